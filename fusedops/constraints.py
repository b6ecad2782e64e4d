"""Limits of a kernel as data. One declaration gives five things.

From ``Dim("x", (-2, -1), at_least=32, at_most=4096, multiple_of=32)`` come

1. a compiled check for the hot path (:func:`compile_check`), an expression built once, as dataclasses build their own;
2. the reasons of a refusal, with the value given, the rule, and the fix (:meth:`Constraint.reasons`);
3. the row of the support table (:meth:`Constraint.describe`);
4. boundary cases for tests (:meth:`Constraint.boundaries`);
5. JSON for other tools (:meth:`Constraint.to_dict`).

Limits speak of shapes, dtypes, device capability, scalars and which optional tensors are present; never of strides (a
launcher copes with those) and never of data. A limit on an argument that is ``None`` is met; :class:`Present` asks for
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusedops._constraint import Arguments, Boundary, Constraint, Reason, ReasonCode, compile_check, plain
from fusedops._spec import TensorSpec, capability_of

__all__ = [
    "Arguments",
    "Boundary",
    "Capability",
    "Constraint",
    "DType",
    "Dim",
    "Present",
    "Rank",
    "Reason",
    "ReasonCode",
    "Scalar",
    "When",
    "compile_check",
]


@dataclass(frozen=True, eq=False)
class Rank(Constraint):
    """The number of dimensions of a tensor is one of ``ranks``."""

    ranks: tuple[int, ...]

    def __init__(self, name: str, *ranks: int) -> None:
        if not ranks:
            raise ValueError(f"Rank({name!r}) needs at least one rank")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "ranks", ranks)

    @property
    def code(self) -> ReasonCode:
        return ReasonCode.RANK

    def expression(self, constants: dict[str, object]) -> str:
        if len(self.ranks) == 1:
            return f"{self.name}.dim() == {self.ranks[0]}"
        return f"{self.name}.dim() in {self.ranks!r}"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensor = args[self.name]
        if tensor is None or tensor.dim() in self.ranks:
            return []
        needed = f"{_either(self.ranks)} dimensions"
        given = f"{self.name} has {tensor.dim()} dimensions"
        wanted = max(self.ranks)
        if tensor.dim() < wanted:
            fix = f"view {self.name} with {wanted} dimensions, adding leading ones of size 1"
        else:
            fix = f"merge leading dimensions of {self.name} until it has {wanted}"
        return [Reason(self.code, f"{given}; needs {needed}", given, needed, fix)]

    def describe(self) -> str:
        return f"{self.name}: {_either(self.ranks)}-D"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        spec: TensorSpec | None = args[self.name]
        if spec is None:
            return
        for rank in sorted({r + step for r in self.ranks for step in (-1, 0, 1) if r + step >= 1}):
            shape = spec.shape[-rank:] if rank <= spec.dim() else (1,) * (rank - spec.dim()) + spec.shape
            yield Boundary(
                f"{self.name} rank {rank}", {**args, self.name: replace(spec, shape=shape)}, rank in self.ranks
            )


@dataclass(frozen=True, eq=False)
class Dim(Constraint):
    """The sizes of some dimensions of a tensor lie in ``[at_least, at_most]`` and are multiples of ``multiple_of``.

    Args:
        name: the tensor argument.
        dims: which dimensions, as torch counts them. A dimension the tensor does not have is not this limit's matter.
        at_least: smallest size, or None.
        at_most: largest size, or None.
        multiple_of: the size is divisible by this, or None.
    """

    dims: tuple[int, ...]
    at_least: int | None = None
    at_most: int | None = None
    multiple_of: int | None = None

    def __post_init__(self) -> None:
        if not self.dims or self.at_least is self.at_most is self.multiple_of is None:
            raise ValueError(f"Dim({self.name!r}) needs dims, and at_least, at_most or multiple_of")

    @property
    def code(self) -> ReasonCode:
        return ReasonCode.SIZE

    def expression(self, constants: dict[str, object]) -> str:
        tests: list[str] = []
        for dim in self.dims:
            size = f"{self.name}.shape[{dim}]"
            low = f"{self.at_least} <= " if self.at_least is not None else ""
            high = f" <= {self.at_most}" if self.at_most is not None else ""
            bound = f"{low}{size}{high}"
            parts = [bound] if low or high else []
            if self.multiple_of is not None:
                parts.append(f"{size} % {self.multiple_of} == 0")
            wanted_rank = dim + 1 if dim >= 0 else -dim
            tests.append(f"({self.name}.dim() < {wanted_rank} or ({' and '.join(parts)}))")
        return " and ".join(tests)

    def reasons(self, args: Arguments) -> list[Reason]:
        tensor = args[self.name]
        if tensor is None:
            return []
        found: list[Reason] = []
        for dim in self.dims:
            if not -tensor.dim() <= dim < tensor.dim():
                continue
            size = int(tensor.shape[dim])
            if self._takes(size):
                continue
            given = f"dim {dim} of {self.name} is {size}"
            found.append(Reason(self.code, f"{given}; needs {self._rule()}", given, self._rule(), self._fix(dim, size)))
        return found

    def _takes(self, size: int) -> bool:
        return (
            (self.at_least is None or size >= self.at_least)
            and (self.at_most is None or size <= self.at_most)
            and (self.multiple_of is None or size % self.multiple_of == 0)
        )

    def _rule(self) -> str:
        bounds = {
            (True, True): f"in [{self.at_least}, {self.at_most}]",
            (True, False): f"of at least {self.at_least}",
            (False, True): f"of at most {self.at_most}",
            (False, False): "",
        }[self.at_least is not None, self.at_most is not None]
        what = "a size" if self.multiple_of is None else f"a multiple of {self.multiple_of}"
        return f"{what} {bounds}".strip()

    def _fix(self, dim: int, size: int) -> str:
        step = self.multiple_of or 1
        padded = -(-max(size, self.at_least or 0) // step) * step
        if self.at_most is not None and padded > self.at_most:
            return f"split {self.name} so that dim {dim} is at most {self.at_most // step * step}"
        return f"pad dim {dim} of {self.name} from {size} to {padded}"

    def describe(self) -> str:
        return f"{self.name}: dim {_either(self.dims, 'and')} {self._rule()}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        spec: TensorSpec | None = args[self.name]
        if spec is None:
            return
        step = self.multiple_of or 1
        low = self.at_least if self.at_least is not None else step
        sizes = {low - 1, low, low + 1, low + step // 2}
        if self.at_most is not None:
            sizes |= {self.at_most - step, self.at_most, self.at_most + 1, self.at_most + step}
        for dim in (dim for dim in self.dims if -spec.dim() <= dim < spec.dim()):
            for size in sorted(size for size in sizes if size >= 0):
                shape = list(spec.shape)
                shape[dim] = size
                yield Boundary(
                    f"{self.name} dim {dim} = {size}",
                    {**args, self.name: replace(spec, shape=tuple(shape))},
                    self._takes(size),
                )


@dataclass(frozen=True, eq=False)
class DType(Constraint):
    """The dtype of a tensor is one of ``dtypes``."""

    dtypes: tuple[torch.dtype, ...]

    def __init__(self, name: str, *dtypes: torch.dtype) -> None:
        if not dtypes:
            raise ValueError(f"DType({name!r}) needs at least one dtype")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "dtypes", dtypes)

    @property
    def code(self) -> ReasonCode:
        return ReasonCode.DTYPE

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name}.dtype in {_constant(constants, frozenset(self.dtypes))}"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensor = args[self.name]
        if tensor is None or tensor.dtype in self.dtypes:
            return []
        names = [plain(dtype) for dtype in self.dtypes]
        given = f"{self.name} is {plain(tensor.dtype)}"
        needed = _either(names)
        return [Reason(self.code, f"{given}; needs {needed}", given, needed, f"convert {self.name} to {needed}")]

    def describe(self) -> str:
        return f"{self.name}: {_either([plain(dtype) for dtype in self.dtypes])}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        spec: TensorSpec | None = args[self.name]
        if spec is None:
            return
        floating = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        for dtype in floating if spec.dtype in floating else (torch.bool, torch.uint8):
            yield Boundary(
                f"{self.name} {plain(dtype)}", {**args, self.name: replace(spec, dtype=dtype)}, dtype in self.dtypes
            )


@dataclass(frozen=True, eq=False)
class Scalar(Constraint):
    """A number argument is at most ``abs_at_most`` in absolute value, or is one of ``one_of``."""

    abs_at_most: float | None = None
    one_of: tuple[object, ...] | None = None

    def __post_init__(self) -> None:
        if self.abs_at_most is None and not self.one_of:
            raise ValueError(f"Scalar({self.name!r}) needs abs_at_most, or at least one value in one_of")

    @property
    def code(self) -> ReasonCode:
        return ReasonCode.SCALAR

    def expression(self, constants: dict[str, object]) -> str:
        tests: list[str] = []
        if self.abs_at_most is not None:
            bound = _constant(constants, self.abs_at_most)
            tests.append(f"-{bound} <= {self.name} <= {bound}")
        if self.one_of is not None:
            tests.append(f"{self.name} in {_constant(constants, self.one_of)}")
        return " and ".join(tests)

    def reasons(self, args: Arguments) -> list[Reason]:
        value = args[self.name]
        if value is None or self._takes(value):
            return []
        given = f"{self.name} is {value!r}"
        return [
            Reason(
                self.code,
                f"{given}; needs {self._rule()}",
                given,
                self._rule(),
                f"pass {self.name} as {self._rule()}",
            )
        ]

    def _takes(self, value: Any) -> bool:
        inside = self.abs_at_most is None or -self.abs_at_most <= value <= self.abs_at_most
        return inside and (self.one_of is None or value in self.one_of)

    def _rule(self) -> str:
        rules: list[str] = []
        if self.abs_at_most is not None:
            rules.append(f"a value in [-{self.abs_at_most:g}, {self.abs_at_most:g}]")
        if self.one_of is not None:
            rules.append(_either([repr(value) for value in self.one_of]))
        return " and ".join(rules)

    def describe(self) -> str:
        return f"{self.name}: {self._rule()}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        values: list[Any] = list(self.one_of or ())
        if values and all(isinstance(value, bool) for value in values):
            values = [False, True]
        elif numbers := [value for value in values if isinstance(value, (int, float))]:
            values.append(max(numbers) * 2 + 1)
        if self.abs_at_most is not None:
            bound = self.abs_at_most
            values += [-bound, bound, bound * 1.5, -bound * 1.5]
        for value in values:
            yield Boundary(f"{self.name} = {value!r}", {**args, self.name: value}, self._takes(value))


@dataclass(frozen=True, eq=False)
class Present(Constraint):
    """An optional argument must be given (``present=True``) or must be left out."""

    present: bool = True

    @property
    def code(self) -> ReasonCode:
        return ReasonCode.PRESENCE

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name} is {'not ' if self.present else ''}None"

    def test(self, constants: dict[str, object]) -> str:
        return f"({self.expression(constants)})"

    def reasons(self, args: Arguments) -> list[Reason]:
        if (args[self.name] is not None) == self.present:
            return []
        given = f"{self.name} is {'None' if self.present else 'given'}"
        needed = f"{self.name} {'given' if self.present else 'left out'}"
        return [Reason(self.code, f"{given}; needs {needed}", given, needed, f"call with {needed}")]

    def describe(self) -> str:
        return f"{self.name}: {'required' if self.present else 'not taken'}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        yield Boundary(f"{self.name} None", {**args, self.name: None}, not self.present)
        if args[self.name] is not None:
            yield Boundary(f"{self.name} given", args, self.present)


@dataclass(frozen=True, eq=False)
class Capability(Constraint):
    """The compute capability of the tensor's device is at least ``at_least``; an unknown one (a CPU, a spec) is met."""

    at_least: tuple[int, int]

    @property
    def code(self) -> ReasonCode:
        return ReasonCode.CAPABILITY

    def expression(self, constants: dict[str, object]) -> str:
        constants["capability_of"] = capability_of
        return f"(capability_of({self.name}) or {self.at_least!r}) >= {self.at_least!r}"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensor = args[self.name]
        capability = None if tensor is None else capability_of(tensor)
        if capability is None or capability >= self.at_least:
            return []
        given = f"the device of {self.name} has compute capability {'.'.join(map(str, capability))}"
        needed = f"at least {'.'.join(map(str, self.at_least))}"
        return [Reason(self.code, f"{given}; needs {needed}", given, needed, "run on a newer device")]

    def describe(self) -> str:
        return f"compute capability at least {'.'.join(map(str, self.at_least))}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        spec: TensorSpec | None = args[self.name]
        if spec is None:
            return
        major, minor = self.at_least
        below = (major, minor - 1) if minor else (major - 1, 9)
        for capability, taken in ((below, False), (self.at_least, True), ((major + 1, 0), True)):
            changed = {**args, self.name: replace(spec, capability=capability)}
            yield Boundary(f"capability {capability}", changed, taken)


@dataclass(frozen=True, eq=False)
class When(Constraint):
    """``then`` binds only calls that meet ``condition``: ``When(DType("x", float16), Scalar("scale", 1.0))``."""

    condition: Constraint
    then: Constraint

    def __init__(self, condition: Constraint, then: Constraint) -> None:
        object.__setattr__(self, "name", then.name)
        object.__setattr__(self, "condition", condition)
        object.__setattr__(self, "then", then)

    @property
    def code(self) -> ReasonCode:
        return self.then.code

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.condition.names, *self.then.names)

    def expression(self, constants: dict[str, object]) -> str:
        return f"not {self.condition.test(constants)} or {self.then.test(constants)}"

    def test(self, constants: dict[str, object]) -> str:
        return f"({self.expression(constants)})"

    def reasons(self, args: Arguments) -> list[Reason]:
        if self.condition.reasons(args):
            return []
        suffix = f" (with {self.condition.describe()})"
        return [replace(r, detail=r.detail + suffix, needed=r.needed + suffix) for r in self.then.reasons(args)]

    def describe(self) -> str:
        return f"{self.then.describe()} where {self.condition.describe()}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        for held in self.condition.boundaries(args):
            for case in self.then.boundaries(held.args):
                # both may be on one argument: then the inner case undoes the outer one, and the labels' "taken" with it
                yield Boundary(f"{held.label}, {case.label}", case.args, not self.reasons(case.args))


def _constant(constants: dict[str, object], value: object) -> str:
    """A name for a value that may have no source text (a dtype, infinity)."""
    key = f"constant_{len(constants)}"
    constants[key] = value
    return key


def _either(values: Sequence[object], word: str = "or") -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {word} {texts[-1]}"

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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, cast

import torch

from fusedops._spec import TensorSpec, capability_of

__all__ = [
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

Arguments = Mapping[str, Any]


class ReasonCode(str, Enum):
    """Why a backend does not serve a call. A closed list, so that tests and tools never read message texts."""

    RANK = "rank"
    SIZE = "size"
    DTYPE = "dtype"
    SCALAR = "scalar"
    PRESENCE = "presence"
    CAPABILITY = "capability"
    DEVICE = "device"
    NO_KERNEL = "no-kernel"
    UNAVAILABLE = "unavailable"
    FAILED = "failed"
    SHARD = "shard"  # of a DTensor, where only the whole tensor will do


@dataclass(frozen=True)
class Reason:
    """One reason of a refusal. It cannot be built without a code and all four texts."""

    code: ReasonCode
    detail: str  # the whole, as a sentence: "dim -1 of x is 500; needs a multiple of 32 in [32, 4096]"
    given: str
    needed: str
    fix: str

    def __post_init__(self) -> None:
        if not isinstance(self.code, ReasonCode):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"a Reason needs a code from ReasonCode, got {self.code!r}")
        if not (self.detail and self.given and self.needed and self.fix):
            raise ValueError(f"a Reason needs detail, given, needed and fix, got {self!r}")

    def to_dict(self) -> dict[str, str]:
        """The reason as JSON-ready data."""
        return {
            "code": self.code.value,
            "detail": self.detail,
            "given": self.given,
            "needed": self.needed,
            "fix": self.fix,
        }


@dataclass(frozen=True)
class Boundary:
    """One case at an edge of a limit: ``args`` differ from the base case in one value, and are taken or not."""

    label: str
    args: Arguments
    taken: bool


@dataclass(frozen=True, eq=False)  # identity hash: a constraint object is a key on the hot path
class Constraint(ABC):
    """One limit of one kernel, on the argument called ``name``."""

    name: str

    @property
    @abstractmethod
    def code(self) -> ReasonCode:
        """The code of every reason that this limit gives."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every argument that the limit looks at."""
        return (self.name,)

    @abstractmethod
    def expression(self, constants: dict[str, object]) -> str:
        """Python source that is true where the call is taken; values it needs go into ``constants``. Not for None."""

    def test(self, constants: dict[str, object]) -> str:
        """:meth:`expression`, also true where the argument is None."""
        return f"({self.name} is None or ({self.expression(constants)}))"

    @abstractmethod
    def reasons(self, args: Arguments) -> list[Reason]:
        """Why the call is refused; empty where it is taken. Equal to the compiled check by a property test."""

    @abstractmethod
    def describe(self) -> str:
        """The limit as a phrase for the support table."""

    @abstractmethod
    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        """Cases just inside and just outside the limit, made from a call ``args`` that is taken."""

    def to_dict(self) -> dict[str, object]:
        """The limit as JSON-ready data."""
        fields: dict[str, object] = {"type": type(self).__name__}
        for key, value in vars(self).items():
            fields[key] = _plain(value)
        return fields


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
        names = [_plain(dtype) for dtype in self.dtypes]
        given = f"{self.name} is {_plain(tensor.dtype)}"
        needed = _either(names)
        return [Reason(self.code, f"{given}; needs {needed}", given, needed, f"convert {self.name} to {needed}")]

    def describe(self) -> str:
        return f"{self.name}: {_either([_plain(dtype) for dtype in self.dtypes])}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        spec: TensorSpec | None = args[self.name]
        if spec is None:
            return
        floating = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        for dtype in floating if spec.dtype in floating else (torch.bool, torch.uint8):
            yield Boundary(
                f"{self.name} {_plain(dtype)}", {**args, self.name: replace(spec, dtype=dtype)}, dtype in self.dtypes
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


def compile_check(parameters: Sequence[str], limits: Sequence[Constraint]) -> Callable[..., Constraint | None] | None:
    """Builds the hot path's check: a function of the call's arguments, in order, that returns the limit that refuses.

    Args:
        parameters: the op's parameter names, in order.
        limits: the kernel's limits, tested in this order.

    Returns:
        A function that returns the refusing constraint, or None where the call is taken; or None when there are no
        limits, so that the caller can skip the call altogether.
    """
    if not limits:
        return None
    constants: dict[str, object] = {}
    lines = [f"def check({', '.join(parameters)}):"]
    for position, limit in enumerate(limits):
        lines.append(f"    if not {limit.test(constants)}: return limit_{position}")
        constants[f"limit_{position}"] = limit
    exec(compile("\n".join(lines), "<fusedops limits>", "exec"), constants)
    return constants["check"]  # type: ignore[return-value]


def _constant(constants: dict[str, object], value: object) -> str:
    """A name for a value that may have no source text (a dtype, infinity)."""
    key = f"constant_{len(constants)}"
    constants[key] = value
    return key


def _either(values: Sequence[object], word: str = "or") -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {word} {texts[-1]}"


def _plain(value: object) -> object:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Constraint):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[object, ...]", value)]
    return value

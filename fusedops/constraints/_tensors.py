"""Constraints on one tensor's rank and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fusedops._contract.constraint import Arguments, Boundary, Constraint, listed
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.reason import Reason, ReasonCode
from fusedops.constraints._symbolic import possible


class Rank(Constraint):
    """The number of dimensions of a tensor is one of ``ranks``, or at least ``at_least``.

    >>> from fusedops.constraints import Rank
    >>> Rank("x", 4).describe()
    'x: 4-D'
    """

    reads_metadata_only = True
    code = ReasonCode.RANK

    def __init__(self, name: str, *ranks: int, at_least: int | None = None) -> None:
        super().__init__(name)
        self.ranks = integers("Rank", name, ranks)
        self.at_least = integer("Rank", name, at_least)
        if bool(ranks) == (at_least is not None):
            raise ValueError(f"Rank({name!r}): expected ranks, such as 3, 4, or at_least; to fix: give one of the two")

    def expression(self, constants: dict[str, object]) -> str:
        if self.at_least is not None:
            return f"{self.name}.dim() >= {self.at_least}"
        if len(self.ranks) == 1:
            return f"{self.name}.dim() == {self.ranks[0]}"
        return f"{self.name}.dim() in {self.ranks!r}"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensor = args[self.name]
        if tensor is None or self._accepts(tensor.dim()):
            return []
        needed = f"{self._rule()} dimension{'s' * (self._rule() != '1')}"
        given = f"{self.name} with {tensor.dim()} dimension{'s' * (tensor.dim() != 1)}"
        wanted = self.at_least or max(self.ranks)
        if tensor.dim() < wanted:
            fix = f"view {self.name} with {wanted} dimensions, with leading ones of size 1"
        else:
            fix = f"merge leading dimensions of {self.name} until it has {wanted}"
        return [Reason(self.code, given, needed, fix)]

    def _accepts(self, rank: int) -> bool:
        return rank in self.ranks if self.at_least is None else rank >= self.at_least

    def _rule(self) -> str:
        return listed(self.ranks) if self.at_least is None else f"at least {self.at_least}"

    def describe(self) -> str:
        return f"{self.name}: {listed(self.ranks)}-D" if self.ranks else f"{self.name}: {self._rule()} dimensions"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        spec: TensorSpec | None = args[self.name]
        if spec is None:
            return
        edges = self.ranks or (self.at_least or 0, spec.dim() + 1)
        for rank in sorted({r + step for r in edges for step in (-1, 0, 1) if r + step >= 1}):
            shape = spec.shape[-rank:] if rank <= spec.dim() else (1,) * (rank - spec.dim()) + spec.shape
            changed = {**args, self.name: spec.replace(shape=shape)}
            yield Boundary(f"{self.name} rank {rank}", changed, self._accepts(rank))


class Dim(Constraint):
    """The sizes of some dimensions of a tensor lie in ``[at_least, at_most]`` and are multiples of ``multiple_of``.

    Args:
        name: the tensor argument.
        dims: which dimensions, as torch counts them. A dimension that the tensor does not have meets the constraint.
        at_least: smallest size, or None.
        at_most: largest size, or None.
        multiple_of: the size is divisible by this, or None.

    >>> from fusedops.constraints import Dim
    >>> Dim("x", (-2, -1), at_least=32, at_most=4096, multiple_of=32).describe()
    'x: dim -2 and -1 a multiple of 32 in [32, 4096]'
    """

    reads_metadata_only = True
    code = ReasonCode.SIZE

    def __init__(
        self,
        name: str,
        dims: tuple[int, ...],
        at_least: int | None = None,
        at_most: int | None = None,
        multiple_of: int | None = None,
    ) -> None:
        super().__init__(name)
        self.dims = integers("Dim", name, dims)
        self.at_least = integer("Dim", name, at_least)
        self.at_most = integer("Dim", name, at_most)
        self.multiple_of = integer("Dim", name, multiple_of)
        if not dims or at_least is at_most is multiple_of is None:
            raise ValueError(f"Dim({name!r}): expected dims, and at_least, at_most or multiple_of; to fix: give them")
        if multiple_of is not None and multiple_of < 1:
            raise ValueError(f"Dim({name!r}): got multiple_of={multiple_of}, expected at least 1; to fix: give that")

    def expression(self, constants: dict[str, object]) -> str:
        tests: list[str] = []
        for dim in self.dims:
            size = f"{self.name}.shape[{dim}]"
            low = f"{self.at_least} <= " if self.at_least is not None else ""
            high = f" <= {self.at_most}" if self.at_most is not None else ""
            parts = [f"{low}{size}{high}"] if low or high else []
            if self.multiple_of is not None:
                parts.append(f"{size} % {self.multiple_of} == 0")
            rank = dim + 1 if dim >= 0 else -dim
            tests.append(f"({self.name}.dim() < {rank} or ({' and '.join(parts)}))")
        return " and ".join(tests)

    def reasons(self, args: Arguments) -> list[Reason]:
        tensor = args[self.name]
        if tensor is None:
            return []
        reasons: list[Reason] = []
        for dim in self.dims:
            if not -tensor.dim() <= dim < tensor.dim():
                continue
            size = tensor.shape[dim]  # not int(...): a graph would be for this size alone
            if not self._accepts(size):
                size = int(size)
                given = f"dim {dim} of {self.name} = {size}"
                reasons.append(Reason(self.code, given, self._rule(), self._fix(dim, size)))
        return reasons

    def _accepts(self, size: int) -> bool:
        return (
            (self.at_least is None or possible(size >= self.at_least))
            and (self.at_most is None or possible(size <= self.at_most))
            and (self.multiple_of is None or possible(size % self.multiple_of == 0))
        )

    def _rule(self) -> str:
        what = "a size" if self.multiple_of is None else f"a multiple of {self.multiple_of}"
        if self.at_least is not None and self.at_most is not None:
            return f"{what} in [{self.at_least}, {self.at_most}]"
        if self.at_least is not None:
            return f"{what} of at least {self.at_least}"
        return what if self.at_most is None else f"{what} of at most {self.at_most}"

    def _fix(self, dim: int, size: int) -> str:
        step = self.multiple_of or 1
        padded = -(-max(size, self.at_least or 0) // step) * step
        if self.at_most is not None and padded > self.at_most:
            return f"split {self.name} so that dim {dim} is at most {self.at_most // step * step}"
        return f"pad dim {dim} of {self.name} from {size} to {padded}"

    def describe(self) -> str:
        return f"{self.name}: dim {listed(self.dims, 'and')} {self._rule()}"

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
                changed = {**args, self.name: spec.replace(shape=tuple(shape))}
                yield Boundary(f"{self.name} dim {dim} = {size}", changed, self._accepts(size))


def integers(kind: str, name: str, values: Any) -> tuple[int, ...]:
    """Return ``values`` as a tuple; ValueError unless each is exactly an int: they become part of compiled source."""
    if not isinstance(values, (tuple, list)) or any(type(value) is not int for value in values):  # pyright: ignore
        raise ValueError(f"{kind}({name!r}): got {values!r}, expected a tuple of ints; to fix: write it like (-2, -1)")
    return tuple(values)  # pyright: ignore


def integer(kind: str, name: str, value: Any) -> int | None:
    """Return ``value``; ValueError unless it is None or exactly an int."""
    if value is not None and type(value) is not int:
        raise ValueError(f"{kind}({name!r}): got {value!r}, expected an int; to fix: convert it with int()")
    return value

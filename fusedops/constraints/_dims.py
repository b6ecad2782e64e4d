"""Constraints on sizes of a tensor beside those of another one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fusedops._contract.constraint import Arguments, Boundary, listed
from fusedops._report.reason import Reason, ReasonCode
from fusedops.constraints._relations import Beside
from fusedops.constraints._symbolic import possible
from fusedops.constraints._tensors import integers


class SameDims(Beside):
    """Some sizes of the tensor are those of ``other``.

    Args:
        name: the tensor argument.
        other: the tensor that it is compared with.
        dims: the dims of both, counted from the first.

    >>> from fusedops.constraints import SameDims
    >>> SameDims("k", "q", (0, 3)).describe()
    'k: dim 0 and 3 as in q'
    """

    code = ReasonCode.SIZE
    reads_shapes = True

    def __init__(self, name: str, other: str, dims: tuple[int, ...]) -> None:
        super().__init__(name, other)
        self.dims = integers("SameDims", name, dims)
        if not dims or min(dims) < 0:
            raise ValueError(f"SameDims({name!r}): got dims {dims!r}, expected some from 0; to fix: write (0, 3)")

    def expression(self, constants: dict[str, object]) -> str:
        return " and ".join(f"{self.name}.shape[{dim}] == {self.other}.shape[{dim}]" for dim in self.dims)

    def reasons(self, args: Arguments) -> list[Reason]:
        tensors = self.specs(args)
        if tensors is None or min(tensors[0].dim(), tensors[1].dim()) <= max(self.dims):
            return []
        tensor, other = tensors
        return [
            Reason(
                self.code,
                f"dim {dim} of {self.name} = {tensor.shape[dim]}",
                f"that of {self.other}, {other.shape[dim]}",
                f"pass {self.name} and {self.other} with one size of dim {dim}",
            )
            for dim in self.dims
            if not possible(tensor.shape[dim] == other.shape[dim])
        ]

    def describe(self) -> str:
        return f"{self.name}: dim {listed(self.dims, 'and')} as in {self.other}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        tensors = self.specs(args)
        if tensors is None:
            return
        yield Boundary(f"{self.name} {tensors[0].shape}", args, not self.reasons(args))
        for dim in self.dims:
            shape = list(tensors[0].shape)
            shape[dim] += 1
            changed = {**args, self.name: tensors[0].replace(shape=tuple(shape))}
            yield Boundary(f"{self.name} dim {dim} = {shape[dim]}", changed, not self.reasons(changed))


class DimMultiple(Beside):
    """A size of the tensor is a multiple of that of ``other``, ``at_most`` times as large. 0 is a multiple of 0 alone.

    Args:
        name: the tensor argument.
        other: the tensor that it is compared with.
        dim: the dim of both, counted from the first.
        at_most: the largest factor, or None. With 1 the sizes are equal.
        fix: the text of the fix, where the usual one is not enough.

    >>> from fusedops.constraints import DimMultiple
    >>> DimMultiple("q", "k", 1).describe()
    'q: dim 1 a multiple of that of k'
    """

    code = ReasonCode.SIZE
    reads_shapes = True

    def __init__(self, name: str, other: str, dim: int, at_most: int | None = None, fix: str = "") -> None:
        super().__init__(name, other)
        (self.dim,) = integers("DimMultiple", name, (dim,))
        self.at_most, self.fix = at_most, fix
        if at_most is not None and (type(at_most) is not int or at_most < 1):
            raise ValueError(
                f"DimMultiple({name!r}): got at_most={at_most!r}, expected an int from 1; to fix: give one"
            )

    def expression(self, constants: dict[str, object]) -> str:
        size, other = f"{self.name}.shape[{self.dim}]", f"{self.other}.shape[{self.dim}]"
        if self.at_most == 1:
            return f"{size} == {other}"
        most = "" if self.at_most is None else f" and {size} <= {self.at_most} * {other}"
        return f"({size} % {other} == 0{most} if {other} else not {size})"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensors = self.specs(args)
        if tensors is None or min(tensors[0].dim(), tensors[1].dim()) <= self.dim:
            return []
        size, other = tensors[0].shape[self.dim], tensors[1].shape[self.dim]
        if self._accepts(size, other):
            return []
        fix = self.fix or f"pass {self.other} with a size of dim {self.dim} that divides {size}"
        return [Reason(self.code, f"dim {self.dim} of {self.name} = {size}", self._rule(other), fix)]

    def _accepts(self, size: int, other: int) -> bool:
        if not possible(other != 0):
            return possible(size == 0)
        return possible(size % other == 0) and (self.at_most is None or possible(size <= self.at_most * other))

    def _rule(self, size: Any) -> str:
        if self.at_most == 1:
            return f"{size}, as in {self.other}"
        most = "" if self.at_most is None else f", at most {self.at_most} times as large"
        return f"a multiple of {size}, as in {self.other}{most}"

    def describe(self) -> str:
        if self.at_most == 1:
            return f"{self.name}: dim {self.dim} as in {self.other}"
        most = "" if self.at_most is None else f", at most {self.at_most} times it"
        return f"{self.name}: dim {self.dim} a multiple of that of {self.other}{most}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        tensors = self.specs(args)
        if tensors is None:
            return
        other = tensors[1].shape[self.dim]
        factors = (1, 2, *((self.at_most, self.at_most + 1) if self.at_most else ()))
        for size in sorted({*(factor * other for factor in factors), other + 1}):
            shape = list(tensors[0].shape)
            shape[self.dim] = size
            changed = {**args, self.name: tensors[0].replace(shape=tuple(shape))}
            yield Boundary(f"{self.name} dim {self.dim} = {size}", changed, self._accepts(size, other))

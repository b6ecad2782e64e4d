"""Constraints on single sizes: of one dim beside a dim of another tensor, and a number of things as an argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fusedops._contract.constraint import Arguments, Boundary
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.reason import Reason, ReasonCode
from fusedops.constraints._choices import Value
from fusedops.constraints._relations import Beside
from fusedops.constraints._symbolic import possible
from fusedops.constraints._tensors import integer


class SameSize(Beside):
    """A dim of the tensor has the size of a dim of ``other``, as a matmul needs.

    Args:
        name: the tensor argument.
        dim: its dim, as torch counts them.
        other: the tensor that it is compared with.
        other_dim: the dim of that tensor. Where one of the two has no such dim, the constraint is met.

    >>> from fusedops.constraints import SameSize
    >>> SameSize("weight", -1, "x", -1).describe()
    'weight: dim -1 of the size of dim -1 of x'
    """

    code = ReasonCode.SIZE
    reads_shapes = True

    def __init__(self, name: str, dim: int, other: str, other_dim: int) -> None:
        super().__init__(name, other)
        sizes = (integer("SameSize", name, dim), integer("SameSize", name, other_dim))
        if sizes[0] is None or sizes[1] is None:
            raise ValueError(f"SameSize({name!r}): got a dim of None, expected an int; to fix: give both dims")
        self.dim, self.other_dim = sizes[0], sizes[1]

    def expression(self, constants: dict[str, object]) -> str:
        ranks = _rank(self.dim), _rank(self.other_dim)
        return (
            f"{self.name}.dim() < {ranks[0]} or {self.other}.dim() < {ranks[1]} or "
            f"{self.name}.shape[{self.dim}] == {self.other}.shape[{self.other_dim}]"
        )

    def reasons(self, args: Arguments) -> list[Reason]:
        tensors = self.specs(args)
        if tensors is None or self._accepts(tuple(tensors[0].shape), tuple(tensors[1].shape)):
            return []
        given = f"{self.name} of shape {tuple(tensors[0].shape)} and {self.other} of {tuple(tensors[1].shape)}"
        needed = f"dim {self.dim} of {self.name} of the size of dim {self.other_dim} of {self.other}"
        size = tensors[1].shape[self.other_dim]
        return [Reason(self.code, given, needed, f"pass {self.name} with a dim {self.dim} of {size}")]

    def _accepts(self, shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
        if len(shape) < _rank(self.dim) or len(other) < _rank(self.other_dim):
            return True
        return possible(shape[self.dim] == other[self.other_dim])

    def describe(self) -> str:
        return f"{self.name}: dim {self.dim} of the size of dim {self.other_dim} of {self.other}"

    def follow(self, args: Arguments) -> TensorSpec | None:
        tensors = self.specs(args)
        if tensors is None or tensors[0].dim() < _rank(self.dim) or tensors[1].dim() < _rank(self.other_dim):
            return None
        shape = list(tensors[0].shape)
        shape[self.dim] = tensors[1].shape[self.other_dim]
        return tensors[0].replace(shape=tuple(shape))

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        tensors = self.specs(args)
        if tensors is None or tensors[0].dim() < _rank(self.dim) or tensors[1].dim() < _rank(self.other_dim):
            return
        size = tensors[1].shape[self.other_dim]
        for each in (size, size + 1):
            shape = list(tensors[0].shape)
            shape[self.dim] = each
            changed = {**args, self.name: tensors[0].replace(shape=tuple(shape))}
            yield Boundary(f"{self.name} dim {self.dim} = {each}", changed, each == size)


def _rank(dim: int) -> int:
    """Return the rank from which on a tensor has the dim."""
    return dim + 1 if dim >= 0 else -dim


class Count(Value):
    """A positive integer, or None.

    >>> from fusedops.constraints import Count
    >>> print(Count("chunk").reasons({"chunk": 0})[0])
    got chunk = 0, expected a positive integer, or None; to fix: pass chunk as a positive integer, or None
    """

    def expression(self, constants: dict[str, object]) -> str:
        return f"type({self.name}) is int and 0 < {self.name} < {2**63}"

    def accepts(self, value: Any) -> bool:
        return value is None or isinstance(value, torch.SymInt) or (type(value) is int and 0 < value < 2**63)

    def rule(self) -> str:
        return "a positive integer, or None"

    def values(self) -> Iterator[Any]:
        yield from (1, 7, 2**63 - 1, 0, -1, 2**63, 1.0, True, None)

    def examples(self, args: Arguments) -> Mapping[str, Any]:
        return {f"{self.name} = {value}": value for value in (1, 7, 2**40)}

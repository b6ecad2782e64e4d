"""The number of rows of a tensor as a constraint: the vendor's losses take rows as one dimension of limited size."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from fusedops import TensorSpec
from fusedops.constraints import ReasonCode, TensorConstraint, constant


def _rows(tensor: TensorSpec) -> int:
    return prod(tensor.shape[:-1])


class Rows(TensorConstraint):
    """The number of rows of a tensor, the product of all sizes but the last, is at most ``at_most``."""

    code = ReasonCode.SIZE

    def __init__(self, name: str, at_most: int) -> None:
        super().__init__(name)
        if type(at_most) is not int:
            raise ValueError(f"Rows({name!r}): got {at_most!r}, expected an int; to fix: convert it with int()")
        self.at_most = at_most

    def expression(self, constants: dict[str, object]) -> str:
        return f"{constant(constants, _rows)}({self.name}) <= {self.at_most}"

    def accepts(self, tensor: Any) -> bool:
        return _rows(tensor) <= self.at_most

    def rule(self) -> str:
        return f"at most {self.at_most} rows"

    def given(self, tensor: Any) -> str:
        return f"{_rows(tensor)} rows of {self.name}"

    def fix_of(self, tensor: Any) -> str:
        return f"split {self.name} into parts of at most {self.at_most} rows"

    def values(self, tensor: TensorSpec) -> Iterator[tuple[str, TensorSpec]]:
        if tensor.dim() >= 2:
            ones = (1,) * (tensor.dim() - 2)
            for rows in (self.at_most - 1, self.at_most, self.at_most + 1):
                yield f"{rows} rows of {self.name}", tensor.replace(shape=(*ones, rows, tensor.shape[-1]))

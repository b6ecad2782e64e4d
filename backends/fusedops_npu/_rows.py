"""The number of rows of a tensor as a constraint: the vendor's losses take rows as one dimension of limited size."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fusedops import TensorSpec
from fusedops.constraints import Arguments, Boundary, Constraint, Reason, ReasonCode, constant


def _rows(tensor: TensorSpec) -> int:
    return prod(tensor.shape[:-1])


class Rows(Constraint):
    """The number of rows of a tensor, the product of all sizes but the last, is at most ``at_most``."""

    reads_metadata_only = True
    code = ReasonCode.SIZE

    def __init__(self, name: str, at_most: int) -> None:
        super().__init__(name)
        if type(at_most) is not int:
            raise ValueError(f"Rows({name!r}): got {at_most!r}, expected an int; to fix: convert it with int()")
        self.at_most = at_most

    def expression(self, constants: dict[str, object]) -> str:
        return f"{constant(constants, _rows)}({self.name}) <= {self.at_most}"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensor = args[self.name]
        if tensor is None or _rows(tensor) <= self.at_most:
            return []
        fix = f"split {self.name} into parts of at most {self.at_most} rows"
        return [Reason(self.code, f"{_rows(tensor)} rows of {self.name}", f"at most {self.at_most} rows", fix)]

    def describe(self) -> str:
        return f"{self.name}: at most {self.at_most} rows"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        spec: TensorSpec | None = args[self.name]
        if spec is None or spec.dim() < 2:
            return
        ones = (1,) * (spec.dim() - 2)
        for rows in (self.at_most - 1, self.at_most, self.at_most + 1):
            changed = {**args, self.name: spec.replace(shape=(*ones, rows, spec.shape[-1]))}
            yield Boundary(f"{rows} rows of {self.name}", changed, rows <= self.at_most)

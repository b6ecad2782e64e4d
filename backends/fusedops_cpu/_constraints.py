"""Constraints that several kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fusedops.constraints import Arguments, Boundary, Constraint, DType, Rank, Reason, ReasonCode

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SameDType(Constraint):
    """The tensor has the dtype of ``other``, which is not optional.

    Args:
        name: the tensor argument.
        other: the tensor that it is compared with.
    """

    code = ReasonCode.DTYPE

    def __init__(self, name: str, other: str) -> None:
        super().__init__(name)
        self.other = Constraint(other).name  # checked the same way

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.other)

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name}.dtype is {self.other}.dtype"

    def reasons(self, args: Arguments) -> list[Reason]:
        tensor, other = args[self.name], args[self.other]
        if tensor is None or tensor.dtype is other.dtype:
            return []
        given, needed = (str(each.dtype).removeprefix("torch.") for each in (tensor, other))
        needed = f"{needed}, the dtype of {self.other}"
        return [Reason(self.code, f"{self.name} of {given}", needed, f"pass {self.name}.to({self.other}.dtype)")]

    def describe(self) -> str:
        return f"{self.name}: the dtype of {self.other}"

    def boundaries(self, args: Arguments) -> Iterator[Boundary]:
        tensor, other = args[self.name], args[self.other]
        if tensor is None:
            return
        for dtype in (*_DTYPES, torch.float64):
            changed = {**args, self.name: tensor.replace(dtype=dtype)}
            label = f"{self.name} {str(dtype).removeprefix('torch.')} beside {self.other} {other.dtype}"
            yield Boundary(label, changed, dtype is other.dtype)


def one_dtype(first: str, *others: str) -> list[Constraint]:
    """Return the constraints that ``first`` has a dtype of the library, and the others have the same."""
    return [DType(first, *_DTYPES), *(SameDType(other, first) for other in others)]


def row_bias(beside: str) -> list[Constraint]:
    """Return the constraints that the bias is one row, or one number, of the dtype of ``beside``."""
    return [Rank("bias", 0, 1), SameDType("bias", beside)]

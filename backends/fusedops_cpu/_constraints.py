"""Constraints that several kernels share."""

from __future__ import annotations

import torch

from fusedops.constraints import Constraint, DType, Rank, SameDType

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Why a kernel does not promise that a row has the same bits whatever the other rows are.
PLACE = "which elements are kept follows from the place of a row in the batch"


def one_dtype(first: str, *others: str) -> list[Constraint]:
    """Return the constraints that ``first`` has a dtype of the library, and the others have the same."""
    return [DType(first, *_DTYPES), *(SameDType(other, first) for other in others)]


def row_bias(beside: str) -> list[Constraint]:
    """Return the constraints that the bias is one row, or one number, of the dtype of ``beside``."""
    return [Rank("bias", 0, 1), SameDType("bias", beside)]


def any_dtype(*names: str) -> list[Constraint]:
    """Return the constraints that each tensor has a dtype of the library."""
    return [DType(name, *_DTYPES) for name in names]

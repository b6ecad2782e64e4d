"""The constraints that several kernels share."""

from __future__ import annotations

import torch

from fusedops.constraints import Dim, DType

#: The longest row of kernels that count columns in 32 bits. The last block may end up to 2**16 columns behind the row.
LONGEST_ROW = 2**31 - 2**16


def factors(*names: str) -> tuple[DType, ...]:
    """Return the constraints on the tensors of a product: Triton 3.6 ends in an assertion for float64 and float16."""
    return tuple(DType(name, torch.float16, torch.bfloat16, torch.float32) for name in names)


def row_length(name: str, dim: int = -1) -> Dim:
    """Return the constraint on a dim that such a kernel goes through in blocks."""
    return Dim(name, (dim,), at_most=LONGEST_ROW)

"""Products of two matrices in the compiled library (``src/dot/linear_product.cpp``)."""

from __future__ import annotations

from torch import Tensor

from fusedops_cpu.launch.calls import results_of
from fusedops_cpu.launch.library import DTYPE_CODES, library
from fusedops_cpu.launch.struct_call import LibraryCall


def multiply(a: Tensor, b: Tensor, out: Tensor, in_bfloat16: bool, adds: bool = False) -> None:
    """Write ``a @ b.T`` into ``out``, float32 and contiguous, or add it; a and b have a dim of stride 1."""
    fields = (a, b, out, *out.shape, a.shape[1], *_operand(a), *_operand(b), adds, in_bfloat16)
    results_of(LibraryCall(library().linear_product, fields, out))


def _operand(matrix: Tensor) -> tuple[int, int, bool]:
    """Return the code of the dtype, the larger stride, and True where a row is contiguous."""
    by_rows = matrix.stride(1) == 1
    return DTYPE_CODES[matrix.dtype], matrix.stride(0 if by_rows else 1), by_rows

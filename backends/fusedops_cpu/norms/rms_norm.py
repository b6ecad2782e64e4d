"""rms_norm in the compiled library: its constraints; the launchers are in ``_norm.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import ops
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.struct_call import LibraryCall
from fusedops_cpu.norms._norm import Results, norm_backward, norm_forward, selected


@library_kernel(
    ops.rms_norm,
    *any_dtype("x", "weight"),
    source="fusedops_cpu/src/elementwise/norm.cpp",
    rows_independent=True,
)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, save: bool) -> LibraryCall | Results:
    """Compute the op; x of any rank and strides, a weight of any dtype of the library."""
    return selected(norm_forward(x, None, weight, None, eps, offset, False, save), 0, 3)


@library_kernel(
    ops.rms_norm,
    *any_dtype("x", "weight"),
    direction="backward",
    source="fusedops_cpu/src/elementwise/norm.cpp",
    rows_independent=True,
)
def rms_norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, offset: float, needs: tuple[bool, ...]
) -> LibraryCall | Results:
    """Compute the gradients of x and weight; the sum for the weight does not depend on the number of threads."""
    wanted = (needs[0], False, needs[1], False)
    return selected(norm_backward(grad, None, x, None, rstd, weight, None, offset, wanted), 0, 2)

"""layer_norm in the compiled library: its constraints; the launchers are in ``_norm.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import ops
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.struct_call import LibraryCall
from fusedops_cpu.norms._norm import Results, norm_backward, norm_forward, selected


@library_kernel(
    ops.layer_norm,
    *any_dtype("x", "weight", "bias"),
    source="fusedops_cpu/src/elementwise/norm.cpp",
    rows_independent=True,
)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, save: bool) -> LibraryCall | Results:
    """Compute the op; x of any rank and strides, weight and bias of any dtypes of the library."""
    return selected(norm_forward(x, None, weight, bias, eps, 0.0, True, save), 0, 2, 3)


@library_kernel(
    ops.layer_norm,
    *any_dtype("x", "weight", "bias"),
    direction="backward",
    source="fusedops_cpu/src/elementwise/norm.cpp",
    rows_independent=True,
)
def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: tuple[bool, ...],
) -> LibraryCall | Results:
    """Compute the gradients of x, weight and bias; sums over rows do not depend on the number of threads."""
    wanted = (needs[0], False, needs[1], needs[2])
    return selected(norm_backward(grad, None, x, mean, rstd, weight, bias, 0.0, wanted), 0, 2, 3)

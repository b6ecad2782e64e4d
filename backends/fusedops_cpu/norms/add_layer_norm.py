"""add_layer_norm in the compiled library: its constraints; the launchers are in ``_norm.py``."""

from __future__ import annotations

from fusedops import ops
from fusedops.ops.norms.arguments import AddLayerNormArgs, AddLayerNormGradArgs
from fusedops_cpu._constraints import any_dtype, one_dtype
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.struct_call import LibraryCall
from fusedops_cpu.norms._norm import Results, add_norm_backward, norm_forward


@library_kernel(
    ops.add_layer_norm,
    *one_dtype("x", "residual"),
    *any_dtype("weight", "bias"),
    source="fusedops_cpu/src/elementwise/norm.cpp",
    rows_independent=True,
)
def add_layer_norm(a: AddLayerNormArgs, save: bool) -> LibraryCall:
    """Compute the op; x and residual of one dtype, weight and bias of any dtypes of the library."""
    return norm_forward(*a, 0.0, True, save)


@library_kernel(
    ops.add_layer_norm,
    *any_dtype("s", "weight", "bias"),
    direction="backward",
    source="fusedops_cpu/src/elementwise/norm.cpp",
    rows_independent=True,
)
def add_layer_norm_backward(a: AddLayerNormGradArgs) -> LibraryCall | Results:
    """Compute the gradients of x, residual, weight and bias; sums over rows do not depend on the threads."""
    return add_norm_backward(a.grad_y, a.grad_s, a.s, a.mean, a.rstd, a.weight, a.bias, 0.0, a.residual_dtype, a.needs)

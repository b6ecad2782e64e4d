"""add_rms_norm in the compiled library: its constraints; the launchers are in ``_norm.py``."""

from __future__ import annotations

from fusedops import ops
from fusedops.ops.norms.arguments import AddRmsNormArgs, AddRmsNormGradArgs
from fusedops_cpu._constraints import any_dtype, one_dtype
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.struct_call import LibraryCall
from fusedops_cpu.norms._norm import Results, add_norm_backward, norm_forward, selected


@library_kernel(
    ops.add_rms_norm,
    *one_dtype("x", "residual"),
    *any_dtype("weight"),
    source="fusedops_cpu/src/elementwise/norm.cpp",
    rows_independent=True,
)
def add_rms_norm(a: AddRmsNormArgs, save: bool) -> LibraryCall | Results:
    """Compute the op; x and residual of one dtype, any rank and strides, a weight of any dtype of the library."""
    return selected(norm_forward(a.x, a.residual, a.weight, None, a.eps, a.offset, False, save), 0, 1, 3)


@library_kernel(
    ops.add_rms_norm,
    *any_dtype("s", "weight"),
    direction="backward",
    source="fusedops_cpu/src/elementwise/norm.cpp",
    rows_independent=True,
)
def add_rms_norm_backward(a: AddRmsNormGradArgs) -> LibraryCall | Results:
    """Compute the gradients of x, residual and weight; the sum for the weight does not depend on the threads."""
    wanted = (*a.needs, False)
    returned = add_norm_backward(
        a.grad_y, a.grad_s, a.s, None, a.rstd, a.weight, None, a.offset, a.residual_dtype, wanted
    )
    return selected(returned, 0, 1, 2)

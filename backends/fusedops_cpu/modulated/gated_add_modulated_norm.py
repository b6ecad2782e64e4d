"""gated_add_modulated_norm in the compiled library: its constraints; the launchers are in ``_modulated.py``."""

from __future__ import annotations

from fusedops import ops
from fusedops.ops.modulated.arguments import GatedAddModulatedNormArgs, GatedAddModulatedNormGradArgs
from fusedops_cpu._constraints import any_dtype, one_dtype
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.struct_call import LibraryCall
from fusedops_cpu.modulated._modulated import SOURCE, Gate, Modulation, Results, backward, forward

_REPEATED = any_dtype("gate", "scale", "shift", "weight", "bias")


@library_kernel(
    ops.gated_add_modulated_norm, *one_dtype("residual", "y"), *_REPEATED, source=SOURCE, rows_independent=True
)
def gated_add_modulated_norm(a: GatedAddModulatedNormArgs, save: bool) -> LibraryCall:
    """Compute the op; residual and y of one dtype, the others of any dtypes of the library, any strides."""
    norm = Modulation(a.scale, a.shift, a.weight, a.bias, a.kind, a.offset)
    return forward(a.residual, Gate(a.y, a.gate, a.activation), norm, a.eps, save)


@library_kernel(
    ops.gated_add_modulated_norm,
    *one_dtype("s", "y"),
    *_REPEATED,
    direction="backward",
    source=SOURCE,
    rows_independent=True,
)
def gated_add_modulated_norm_backward(a: GatedAddModulatedNormGradArgs) -> LibraryCall | Results:
    """Compute the gradients; sums over rows do not depend on the number of threads."""
    norm = Modulation(a.scale, a.shift, a.weight, a.bias, a.kind, a.offset)
    gate = Gate(a.y, a.gate, a.activation)
    return backward(a.grad_z, a.grad_s, a.s, (a.mean, a.rstd), gate, norm, a.needs)

"""modulated_norm in the compiled library: its constraints; the launchers are in ``_modulated.py``."""

from __future__ import annotations

from fusedops import ops
from fusedops.ops.modulated.arguments import ModulatedNormArgs, ModulatedNormGradArgs
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.struct_call import LibraryCall
from fusedops_cpu.modulated._modulated import SOURCE, Gate, Modulation, Results, backward, forward
from fusedops_cpu.norms._norm import selected

_CONSTRAINTS = any_dtype("x", "scale", "shift", "weight", "bias")


@library_kernel(ops.modulated_norm, *_CONSTRAINTS, source=SOURCE, rows_independent=True)
def modulated_norm(a: ModulatedNormArgs, save: bool) -> LibraryCall | Results:
    """Compute the op; tensors of any strides, of any dtypes of the library."""
    norm = Modulation(a.scale, a.shift, a.weight, a.bias, a.kind, a.offset)
    return selected(forward(a.x, Gate(), norm, a.eps, save), 0, 2, 3)


@library_kernel(ops.modulated_norm, *_CONSTRAINTS, direction="backward", source=SOURCE, rows_independent=True)
def modulated_norm_backward(a: ModulatedNormGradArgs) -> LibraryCall | Results:
    """Compute the gradients; sums over rows do not depend on the number of threads."""
    norm = Modulation(a.scale, a.shift, a.weight, a.bias, a.kind, a.offset)
    wanted = (a.needs[0], False, False, *a.needs[1:])
    return selected(backward(a.grad, None, a.x, (a.mean, a.rstd), Gate(), norm, wanted), 0, 3, 4, 5, 6)

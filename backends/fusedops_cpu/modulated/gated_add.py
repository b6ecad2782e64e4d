"""gated_add in the compiled library: its constraints; the launchers are in ``_modulated.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import ops
from fusedops_cpu._constraints import any_dtype, one_dtype
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.struct_call import LibraryCall
from fusedops_cpu.modulated._modulated import SOURCE, Gate, Modulation, Results, backward, forward
from fusedops_cpu.norms._norm import selected


@library_kernel(ops.gated_add, *one_dtype("residual", "y"), *any_dtype("gate"), source=SOURCE, rows_independent=True)
def gated_add(residual: Tensor, y: Tensor, gate: Tensor, activation: str) -> LibraryCall | Results:
    """Compute the op; residual and y of one dtype, a gate of any dtype of the library, any strides."""
    return selected(forward(residual, Gate(y, gate, activation), Modulation(), 0.0, False), 1)


@library_kernel(
    ops.gated_add,
    *one_dtype("grad", "y"),
    *any_dtype("gate"),
    direction="backward",
    source=SOURCE,
    rows_independent=True,
)
def gated_add_backward(
    grad: Tensor, y: Tensor, gate: Tensor, activation: str, needs: tuple[bool, ...]
) -> LibraryCall | Results:
    """Compute the gradients of y and gate; sums over rows do not depend on the number of threads."""
    wanted = (False, *needs, False, False, False, False)
    return selected(backward(None, grad, grad, None, Gate(y, gate, activation), Modulation(), wanted), 1, 2)

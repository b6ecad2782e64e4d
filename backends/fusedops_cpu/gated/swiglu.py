"""swiglu in the compiled library: its constraints; the launchers are in ``_gated.py``."""

from __future__ import annotations

import math

from torch import Tensor

from fusedops import ops
from fusedops_cpu._calls import library_kernel
from fusedops_cpu._constraints import one_dtype
from fusedops_cpu._struct_call import LibraryCall
from fusedops_cpu.gated._gated import SWISH, gated_backward, gated_forward


@library_kernel(
    ops.swiglu,
    *one_dtype("gate", "up"),
    source="fusedops_cpu/src/elementwise/gated.cpp",
    rows_independent=True,
)
def swiglu(
    gate: Tensor, up: Tensor | None, limit: float | None, alpha: float, offset: float, interleaved: bool
) -> LibraryCall:
    """Compute the op for two tensors of one dtype and for packed ones, of any shape and strides."""
    return gated_forward(gate, up, interleaved, SWISH, math.nan if limit is None else limit, alpha, offset)


@library_kernel(
    ops.swiglu,
    *one_dtype("gate", "up"),
    direction="backward",
    source="fusedops_cpu/src/elementwise/gated.cpp",
    rows_independent=True,
)
def swiglu_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    limit: float | None,
    alpha: float,
    offset: float,
    interleaved: bool,
    needs: tuple[bool, ...],
) -> LibraryCall:
    """Compute the gradients of gate and up in one pass."""
    limit = math.nan if limit is None else limit
    return gated_backward(grad, gate, up, interleaved, SWISH, limit, alpha, offset, needs)

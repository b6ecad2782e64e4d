"""geglu in the compiled library: its constraints; the launchers are in ``_gated.py``."""

from __future__ import annotations

import math

from torch import Tensor

from fusedops import ops
from fusedops_cpu._constraints import one_dtype
from fusedops_cpu.gated._gated import GELU_ERF, GELU_TANH, gated_backward, gated_forward
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.struct_call import LibraryCall


@library_kernel(
    ops.geglu,
    *one_dtype("gate", "up"),
    source="fusedops_cpu/src/elementwise/gated.cpp",
    rows_independent=True,
)
def geglu(gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool) -> LibraryCall:
    """Compute the op for two tensors of one dtype and for packed ones, of any shape and strides."""
    return gated_forward(gate, up, interleaved, _code(approximate), math.nan, 1.0, 0.0)


@library_kernel(
    ops.geglu,
    *one_dtype("gate", "up"),
    direction="backward",
    source="fusedops_cpu/src/elementwise/gated.cpp",
    rows_independent=True,
)
def geglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool, needs: tuple[bool, ...]
) -> LibraryCall:
    """Compute the gradients of gate and up in one pass."""
    return gated_backward(grad, gate, up, interleaved, _code(approximate), math.nan, 1.0, 0.0, needs)


def _code(approximate: str) -> int:
    return GELU_TANH if approximate == "tanh" else GELU_ERF

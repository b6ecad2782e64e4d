"""geglu in the compiled library: its constraints; the launchers are in ``_gated.py``."""

from __future__ import annotations

import math

from torch import Tensor

from fusedops import kernel, ops
from fusedops.packed_call import PackedCall
from fusedops_cpu._constraints import one_dtype
from fusedops_cpu._gated import GELU_ERF, GELU_TANH, gated_backward, gated_forward


@kernel(ops.geglu, *one_dtype("gate", "up"), source="fusedops_cpu/src/gated.cpp", packed=True)
def geglu(gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool) -> PackedCall:
    """Compute the op for two tensors of one dtype and for packed ones, of any shape and strides."""
    return gated_forward(gate, up, interleaved, _code(approximate), math.nan, 1.0, 0.0)


@kernel(ops.geglu, *one_dtype("gate", "up"), direction="backward", source="fusedops_cpu/src/gated.cpp", packed=True)
def geglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool, needs: tuple[bool, ...]
) -> PackedCall:
    """Compute the gradients of gate and up in one pass."""
    return gated_backward(grad, gate, up, interleaved, _code(approximate), math.nan, 1.0, 0.0, needs)


def _code(approximate: str) -> int:
    return GELU_TANH if approximate == "tanh" else GELU_ERF

"""SwiGLU in plain torch, on any device. Computed in float32 (float64 for float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import promoted
from fusedops.ops import OPS
from fusedops.ops.gated.formulas import wide_pair


def swiglu_forward(
    gate: Tensor, up: Tensor | None, limit: float | None, alpha: float, offset: float, interleaved: bool
) -> Tensor:
    """Compute ``gate * sigmoid(alpha * gate) * (up + offset)``, (..., H), contiguous, by torch's silu where it can.

    Args:
        gate: (..., H), or (..., 2H) without up; floating, any strides.
        up: the shape of gate, floating, any strides, or None.
        limit: upper bound of gate, and bound of up on both sides; or None.
        alpha: a number.
        offset: a number.
        interleaved: gate and up are at even and odd positions of a packed tensor.
    """
    if alpha != 1:
        return OPS["swiglu"].reference(gate, up, limit, alpha, offset, interleaved).contiguous()
    g, u = wide_pair(gate, up, interleaved)
    if limit is not None:
        u = u.clamp(-limit, limit)
    # silu of -inf is NaN in torch
    activated = torch.nn.functional.silu(g.clamp(torch.finfo(g.dtype).min, limit))
    return activated.mul_(u + offset if offset else u).to(promoted(gate, up)).contiguous()

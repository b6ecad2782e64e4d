"""GEGLU in plain torch: any device, fast on a CPU, in slabs. The forms of GELU are those of ``_gelu.py``.

The gate is clamped to -32 from below, where GELU is 0, as -inf * 0 is NaN; for the derivative to 32 from above too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, promoted
from fusedops.ops import OPS
from fusedops_eager._bias import slab_elements
from fusedops_eager._gated import empty_gradients, views, widened
from fusedops_eager._slabs import Buffers, pieces

_A = -2 * math.sqrt(2 / math.pi) / math.log(2)
_B = 0.044715 * _A
_SATURATION = 32.0


def geglu_forward(gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool) -> Tensor:
    """Compute ``gelu(gate) * up``.

    Args:
        gate: (..., H), or (..., 2H) without up; floating, any strides.
        up: the shape of gate, floating, any strides, or None.
        approximate: "tanh", or "none" for the exact form.
        interleaved: gate and up are at even and odd positions of a packed tensor.

    Returns:
        (..., H), contiguous, the promoted dtype.
    """
    if not gate.is_cpu:
        return OPS["geglu"].reference(gate, up, approximate, interleaved).contiguous()
    wide, (g, u) = compute_dtype(promoted(gate, up)), views(gate, up, interleaved)
    dtype = promoted(gate, up)
    out, a = torch.empty(g.shape, dtype=dtype, device="cpu"), torch.tensor(_A, dtype=wide, device="cpu")
    size = slab_elements(out.numel(), 3 * wide.itemsize, dtype.itemsize)
    buffers = Buffers(size, wide)
    for o, g_part, u_part in pieces(size, out, g, u):
        gs = torch.clamp(widened(g_part, buffers(0, o.shape)), min=-_SATURATION, out=buffers(0, o.shape))
        if approximate == "tanh":
            w = torch.addcmul(a, gs, gs, value=_B, out=buffers(1, o.shape)).mul_(gs).exp2_().add_(1)
            activated = torch.div(gs, w, out=w)
        else:
            half = torch.mul(gs, math.sqrt(0.5), out=buffers(1, o.shape)).erf_().add_(1).mul_(0.5)
            activated = half.mul_(gs)
        o.copy_(activated.mul_(widened(u_part, buffers(2, o.shape))))
    return out


def geglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of gate and of up from the inputs, contiguous; None for one that is not wanted.

    Args:
        grad: (..., H), the promoted dtype, any strides.
        gate: as in the forward.
        up: as in the forward.
        approximate: as in the forward.
        interleaved: as in the forward.
        needs: (gradient of gate is wanted, gradient of up is wanted).
    """
    if not gate.is_cpu:
        dgate, dup = OPS["geglu"].backward(grad, gate, up, approximate, interleaved, needs)
        return None if dgate is None else dgate.contiguous(), None if dup is None else dup.contiguous()
    wide, (g, u) = compute_dtype(promoted(gate, up)), views(gate, up, interleaved)
    results, (to_gate, to_up) = empty_gradients(gate, up, interleaved, needs)
    if to_gate is None and to_up is None:
        return results
    size = slab_elements(g.numel(), 5 * wide.itemsize, grad.dtype.itemsize)
    buffers = Buffers(size, wide)
    for g_part, u_part, grad_part, dg, du in pieces(size, g, u, grad, to_gate, to_up):
        shape = g_part.shape
        c = torch.clamp(widened(g_part, buffers(0, shape)), -_SATURATION, _SATURATION, out=buffers(0, shape))
        half, slope = _half_and_slope(c, approximate, buffers)
        wide_grad = widened(grad_part, buffers(4, shape))
        if dg is not None:
            dg.copy_(slope.mul_(wide_grad).mul_(u_part))
        if du is not None:
            gs = torch.clamp(widened(g_part, buffers(0, shape)), min=-_SATURATION, out=buffers(0, shape))
            du.copy_(gs.mul_(half).mul_(wide_grad))
    return results


def _half_and_slope(c: Tensor, approximate: str, buffers: Buffers) -> tuple[Tensor, Tensor]:
    """Return ``gelu(c) / c`` and the derivative at c, in buffers 2 and 3. Uses buffer 1."""
    shape = c.shape
    if approximate == "tanh":
        # s = 1 / (1 + 2**w); the slope is s * (1 - ln(2) * (1 - s) * (3 * w - 2 * A * c)), see _gelu.py
        a, one = (torch.tensor(value, dtype=c.dtype, device="cpu") for value in (_A, 1.0))
        w = torch.addcmul(a, c, c, value=_B, out=buffers(1, shape)).mul_(c)
        s = torch.exp2(w, out=buffers(2, shape)).add_(1).reciprocal_()
        w.mul_(3).add_(c, alpha=-2 * _A)
        return s, torch.sub(one, s, out=buffers(3, shape)).mul_(w).mul_(-math.log(2)).add_(1).mul_(s)
    half = torch.mul(c, math.sqrt(0.5), out=buffers(2, shape)).erf_().add_(1).mul_(0.5)
    density = torch.mul(c, c, out=buffers(3, shape)).mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    return half, density.mul_(c).add_(half)

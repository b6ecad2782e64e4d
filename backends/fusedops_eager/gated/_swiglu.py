"""SwiGLU in plain torch: any device, fast on a CPU.

``sigmoid(alpha * g) = 1 / (1 + 2**w)`` with ``w = -alpha / ln(2) * g``: ATen's exp2 takes 0.5 ns for an element in the
cache and its sigmoid 0.9 ns (see ``_gelu.py``). g is clamped to finite values from below, as -inf / inf is NaN. The
compute dtype is float32 (float64 for float64). On a CPU, large tensors are processed in slabs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, promoted
from fusedops.ops import OPS
from fusedops_eager._bias import slab_elements
from fusedops_eager._gated import MIN_SLAB_ELEMENTS, empty_gradients, shifted, views, widened
from fusedops_eager._slabs import Buffers, pieces


def swiglu_forward(
    gate: Tensor, up: Tensor | None, limit: float | None, alpha: float, offset: float, interleaved: bool
) -> Tensor:
    """Compute ``gate * sigmoid(alpha * gate) * (up + offset)``.

    Args:
        gate: (..., H), or (..., 2H) without up; floating, any strides.
        up: the shape of gate, floating, any strides, or None.
        limit: upper bound of gate, and bound of up on both sides; or None.
        alpha: a number.
        offset: a number.
        interleaved: gate and up are at even and odd positions of a packed tensor.

    Returns:
        (..., H), contiguous, the promoted dtype.
    """
    wide = compute_dtype(promoted(gate, up))
    if not _saturates(alpha, wide):
        return OPS["swiglu"].reference(gate, up, limit, alpha, offset, interleaved).contiguous()
    g, u = views(gate, up, interleaved)
    dtype = promoted(gate, up)
    least = torch.finfo(wide).min
    exponent = max(-alpha / math.log(2), least)
    if not gate.is_cpu or g.numel() < MIN_SLAB_ELEMENTS:
        g, u = g.to(wide).clamp(least, limit), u.to(wide)
        activated = torch.nn.functional.silu(g) if alpha == 1 else torch.sigmoid(alpha * g).mul_(g)
        u = u if limit is None else u.clamp(-limit, limit)
        return activated.mul_(u + offset if offset else u).to(dtype).contiguous()
    out = torch.empty(g.shape, dtype=dtype, device="cpu")
    count = 2 + (bool(offset) or limit is not None) if dtype is wide else 3
    size = slab_elements(out.numel(), count * wide.itemsize, dtype.itemsize)
    buffers = Buffers(size, wide)
    for o, g_part, u_part in pieces(size, out, g, u):
        gs = torch.clamp(widened(g_part, buffers(0, o.shape)), least, limit, out=buffers(0, o.shape))
        w = torch.mul(gs, exponent, out=buffers(1, o.shape)).exp2_().add_(1)
        us = widened(shifted(u_part, offset, limit, buffers(2, o.shape)), buffers(2, o.shape))
        y = o if dtype is wide else w
        torch.mul(torch.div(gs, w, out=y), us, out=y)
        if y is not o:
            o.copy_(y)
    return out


def swiglu_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    limit: float | None,
    alpha: float,
    offset: float,
    interleaved: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of gate and of up from the inputs.

    With ``s = sigmoid(alpha * g)`` and ``a = g * s``, the slope of a is ``s + alpha * a * (1 - s)``.

    Args:
        grad: (..., H), the promoted dtype, any strides.
        gate: as in the forward.
        up: as in the forward.
        limit: as in the forward.
        alpha: as in the forward.
        offset: as in the forward.
        interleaved: as in the forward.
        needs: (gradient of gate is wanted, gradient of up is wanted).

    Returns:
        Contiguous, of the shapes and dtypes of gate and up; None for a gradient that is not wanted.
    """
    wide = compute_dtype(promoted(gate, up))
    if not gate.is_cpu or not _saturates(alpha, wide):
        both = OPS["swiglu"].backward(grad, gate, up, limit, alpha, offset, interleaved, needs)
        return tuple(each if each is None else each.contiguous() for each in both)  # pyright: ignore
    g, u = views(gate, up, interleaved)
    results, (dgate, dup) = empty_gradients(gate, up, interleaved, needs)
    if dgate is None and dup is None:
        return results
    least = torch.finfo(wide).min
    exponent = max(-alpha / math.log(2), least)
    one = torch.ones((), dtype=wide, device="cpu")
    largest = [None if limit is None else _largest(limit, wide, each.dtype) for each in (g, u)]
    size = slab_elements(g.numel(), 5 * wide.itemsize, grad.dtype.itemsize)
    buffers = Buffers(size, wide)
    for g_part, u_part, grad_part, dg, du in pieces(size, g, u, grad, dgate, dup):
        shape = g_part.shape
        gs = torch.clamp(widened(g_part, buffers(0, shape)), least, limit, out=buffers(0, shape))
        s = torch.mul(gs, exponent, out=buffers(1, shape)).exp2_().add_(1).reciprocal_()
        a = torch.mul(gs, s, out=buffers(2, shape))
        wide_grad = widened(grad_part, buffers(3, shape))
        if du is not None:
            result = torch.mul(wide_grad, a, out=buffers(4, shape))
            if largest[1] is not None:
                result.masked_fill_(u_part.abs().le(largest[1]).logical_not_(), 0.0)
            du.copy_(result)
        if dg is not None:
            slope = torch.addcmul(s, torch.sub(one, s, out=gs), a, value=alpha, out=gs).mul_(wide_grad)
            slope.mul_(shifted(u_part, offset, limit, buffers(4, shape)))
            if largest[0] is not None:
                slope.masked_fill_(g_part.le(largest[0]).logical_not_(), 0.0)
            dg.copy_(slope)
    return results


def _saturates(alpha: float, wide: torch.dtype) -> bool:
    """Return True where the sigmoid of alpha times the least finite number is 0, as that of -inf is."""
    return alpha * torch.finfo(wide).max > 1000


def _largest(limit: float, wide: torch.dtype, dtype: torch.dtype) -> float:
    """Return the largest number of ``dtype`` that is at most ``limit`` in ``wide``: torch compares in ``dtype``."""
    exact = torch.tensor(limit, dtype=wide, device="cpu")
    rounded = exact.to(dtype)
    if rounded.to(wide) > exact:
        rounded = torch.nextafter(rounded, torch.zeros_like(rounded))
    return float(rounded)

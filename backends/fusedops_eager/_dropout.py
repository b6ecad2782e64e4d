"""Bias + dropout (+ residual) in plain torch on a CPU: slab by slab, each slab with its stretch of the Philox mask.

The mask comes as the integers 1 and 0, and is multiplied into the bits of the floats: a dropped element is exactly 0,
whatever it was, in one vectorised pass (masked_fill with a bool mask takes 10 to 40 times as long, and a product of
floats would make NaN of a dropped inf).
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from fusedops.ops import OPS
from fusedops.ops._philox import threshold
from fusedops_eager._bias import BiasGradient, add, at_rank, slab
from fusedops_eager._philox import Keep
from fusedops_eager._slabs import Buffers, pieces

# The mask's bytes for each element of a slab, by half: it takes 65 calls, so that larger slabs are worth the memory.
_MASK = Keep.BYTES // 2
_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def dropout_forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, training: bool, seed: Tensor | None
) -> Tensor:
    """``dropout(x + bias)``, or ``residual + dropout(x + bias)``.

    Args:
        x: (...), floating, any strides.
        bias: broadcastable to x, floating, or None.
        residual: (...), of the shape of x, floating, or None. x and the bias are taken in its dtype first.
        p: probability of dropping, in [0, 1].
        training: False drops nothing.
        seed: int64, one element. None: nothing is dropped.

    Returns:
        (...), contiguous. Computed in float32 (float64 for float64).
    """
    if not _serves(x):
        if residual is None:
            return OPS["bias_dropout"].reference(x, bias, p, training=training, seed=seed).contiguous()
        return OPS["bias_dropout_add"].reference(x, bias, residual, p, training=training, seed=seed).contiguous()
    if not training or p == 0:
        seed = None
    dtype = residual.dtype if residual is not None else x.dtype
    if residual is None and bias is not None:
        dtype = torch.promote_types(dtype, bias.dtype)
    out = torch.empty(x.shape, dtype=dtype, device="cpu")
    if _drops_all(p, seed):
        return out.zero_() if residual is None else out.copy_(residual)
    wide = torch.promote_types(dtype, torch.float32)
    needed = 1 if dtype is wide or residual is None else 2
    size = slab(x.numel(), needed * wide.itemsize + (seed is not None) * _MASK, dtype.itemsize)
    drop, buffers = _Drop(seed, p, size), Buffers(size, wide)
    for o, part, b, r in pieces(size, out, x, at_rank(bias, x.dim()), residual):
        u, y = buffers(0, o.shape), o if dtype is wide else buffers(0, o.shape)
        if residual is None:
            if seed is None:
                add(part, b, y)
            else:
                torch.mul(drop(add(part, b, u)), drop.scale, out=y)
        else:
            drop(add(_rounded(part, dtype), None if b is None else _rounded(b, dtype), u))
            torch.add(r if dtype is wide else buffers(1, o.shape).copy_(r), u, alpha=drop.scale, out=y)
        if y is not o:
            o.copy_(y)
    return out


def dropout_backward(
    grad: Tensor,
    seed: Tensor | None,
    bias: Tensor | None,
    p: float,
    training: bool,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and of the bias, with the mask of the forward.

    Args:
        grad: (...), floating, any strides.
        seed: as in the forward.
        bias: as in the forward; only its shape and dtype are looked at.
        p: as in the forward.
        training: as in the forward.
        x_dtype: of the gradient of x.
        needs: whether that of x is wanted, and that of the bias.

    Returns:
        (...), contiguous, and the bias's shape; None where not wanted. The sum is taken in float32, in one order.
    """
    if not _serves(grad):
        dx, dbias = OPS["bias_dropout"].backward(grad, seed, bias, p, training, x_dtype, needs)
        return None if dx is None else dx.contiguous(), dbias
    if not training or p == 0:
        seed = None
    wide = torch.promote_types(grad.dtype, torch.float32)
    dx = torch.empty(grad.shape, dtype=x_dtype, device="cpu") if needs[0] else None
    sums = BiasGradient(bias, grad.shape, wide) if bias is not None and needs[1] else None
    if _drops_all(p, seed):
        return None if dx is None else dx.zero_(), None if sums is None else sums.result()
    if dx is None and sums is None:
        return None, None
    if dx is None and sums is not None and seed is None and grad.dtype is wide:  # nothing but a sum of what is there
        sums.add(grad.contiguous(), sums.at_rank)
        return None, sums.result()
    narrow = dx is None or x_dtype is not wide
    needed = narrow * wide.itemsize + (seed is not None) * _MASK
    size = slab(grad.numel(), needed, x_dtype.itemsize, None if sums is None else 2)
    drop, buffers = _Drop(seed, p, size), Buffers(size, wide)
    for g, o, total in pieces(size, grad, dx, None if sums is None else sums.at_rank):
        du = buffers(0, g.shape) if narrow else o
        if g.dtype is wide:
            torch.mul(g, drop.scale, out=du)
        else:
            du.copy_(g)  # mul(bfloat16, scale, out=float32) would round before it stores
            if drop.scale != 1.0:
                du.mul_(drop.scale)
        drop(du)
        if narrow and o is not None:
            o.copy_(du)
        if sums is not None:
            sums.add(du, total)
    return dx, None if sums is None else sums.result()


def _serves(x: Tensor) -> bool:
    """Whether the slabs may: they read the seed, which elsewhere waits for the device, and the halves of an int64."""
    return x.is_cpu and sys.byteorder == "little"


def _drops_all(p: float, seed: Tensor | None) -> bool:
    return seed is not None and threshold(p) == 2**32


def _rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t`` as it would be in ``dtype``: converted only where that rounds, for widening is left to the sum."""
    return t if torch.promote_types(t.dtype, dtype) is dtype else t.to(dtype)


class _Drop:
    """The mask and the scale of one call.

    Args:
        seed: as in the forward.
        p: as in the forward.
        size: elements of the largest slab.
    """

    def __init__(self, seed: Tensor | None, p: float, size: int) -> None:
        self.scale = 1.0 if seed is None else 1 / (1 - p)
        self._keep = None if seed is None else Keep(int(seed.item()), p, size)
        self._at = 0  # slabs come in order, each a stretch of the linear index

    def __call__(self, u: Tensor) -> Tensor:
        """Makes the dropped elements of the next slab 0. ``u`` is contiguous, float32 or float64."""
        if self._keep is not None and u.numel():
            u.view(_INTEGER[u.dtype]).mul_(self._keep(self._at, u.numel()).view(u.shape))
            self._at += u.numel()
        return u

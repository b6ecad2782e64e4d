"""Bias + dropout (+ residual) in plain torch on a CPU. Each slab is processed with its range of the Philox mask.

The mask is a tensor of the integers 1 and 0. It is multiplied with the bits of the floats, which sets a dropped element
to exactly 0, whatever its value, in one vectorised pass. ``masked_fill`` with a bool mask takes 10 to 40 times as long,
and a product of floats would turn a dropped inf into NaN.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype
from fusedops.ops import OPS
from fusedops.philox import threshold
from fusedops_eager._bias import BiasGradient, add, slab_elements, with_rank
from fusedops_eager._philox import KeepMask
from fusedops_eager._slabs import Buffers, pieces

# Half the bytes that the mask takes per element of a slab. Only half is counted, which makes slabs larger: the mask
# takes 65 torch calls per slab, so fewer slabs are worth the memory.
_MASK_BYTES = KeepMask.BYTES // 2
_INTEGER_DTYPE = {torch.float32: torch.int32, torch.float64: torch.int64}


def bias_dropout(x: Tensor, bias: Tensor | None, p: float, training: bool, seed: Tensor | None) -> Tensor:
    """Compute the op on any device, for any rank and bias shape."""
    return dropout_forward(x, bias, None, p, training, seed)


def dropout_forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, training: bool, seed: Tensor | None
) -> Tensor:
    """Compute ``dropout(x + bias)``, or ``residual + dropout(x + bias)``.

    Args:
        x: (...), floating, any strides.
        bias: broadcastable to x, floating, or None.
        residual: (...), the shape of x, floating, or None. x and the bias are first converted to its dtype.
        p: probability of dropping, in [0, 1].
        training: False drops nothing.
        seed: int64, one element. None: nothing is dropped.

    Returns:
        (...), contiguous. Computed in float32 (float64 for float64).
    """
    if not _supports_slabs(x):
        if residual is None:
            y: Tensor = OPS["bias_dropout"].reference(x, bias, p, training, seed)
            # without a bias and dropout it is x itself: a change of the result would change x
            return y.clone(memory_format=torch.contiguous_format) if y is x else y.contiguous()
        return OPS["bias_dropout_add"].reference(x, bias, residual, p, training, seed).contiguous()
    if not training or p == 0:
        seed = None
    dtype = residual.dtype if residual is not None else x.dtype
    if residual is None and bias is not None:
        dtype = torch.promote_types(dtype, bias.dtype)
    out = torch.empty(x.shape, dtype=dtype, device="cpu")
    if _drops_all(p, seed):
        return out.zero_() if residual is None else out.copy_(residual)
    wide = compute_dtype(dtype)
    buffer_count = 1 if dtype is wide or residual is None else 2
    buffer_bytes = buffer_count * wide.itemsize + (seed is not None) * _MASK_BYTES
    size = slab_elements(x.numel(), buffer_bytes, dtype.itemsize)
    drop, buffers = _Dropout(seed, p, size), Buffers(size, wide)
    for o, part, b, r in pieces(size, out, x, with_rank(bias, x.dim()), residual):
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
    """Compute the gradients of x and of the bias, with the mask of the forward.

    Args:
        grad: (...), floating, any strides.
        seed: as in the forward.
        bias: as in the forward; only its shape and dtype are used.
        p: as in the forward.
        training: as in the forward.
        x_dtype: dtype of the gradient of x.
        needs: (gradient of x is wanted, gradient of the bias is wanted).

    Returns:
        (...), contiguous, and the shape of the bias; None for a gradient that is not wanted. The sum is accumulated in
        float32 (float64 for float64), in a fixed order.
    """
    if not _supports_slabs(grad):
        dx, dbias = OPS["bias_dropout"].backward(grad, seed, bias, p, training, x_dtype, needs)
        return None if dx is None else dx.contiguous(), dbias
    if not training or p == 0:
        seed = None
    wide = compute_dtype(grad.dtype)
    dx = torch.empty(grad.shape, dtype=x_dtype, device="cpu") if needs[0] else None
    sums = BiasGradient(bias, grad.shape, wide) if bias is not None and needs[1] else None
    if _drops_all(p, seed):
        return None if dx is None else dx.zero_(), None if sums is None else sums.result()
    if dx is None and sums is None:
        return None, None
    if dx is None and sums is not None and seed is None and grad.dtype is wide:  # the sum of grad is all that is needed
        sums.add(grad.contiguous(), sums.sum_at_rank)
        return None, sums.result()
    needs_buffer = dx is None or x_dtype is not wide
    buffer_bytes = needs_buffer * wide.itemsize + (seed is not None) * _MASK_BYTES
    size = slab_elements(grad.numel(), buffer_bytes, x_dtype.itemsize, None if sums is None else 2)
    drop, buffers = _Dropout(seed, p, size), Buffers(size, wide)
    for g, o, total in pieces(size, grad, dx, None if sums is None else sums.sum_at_rank):
        du = buffers(0, g.shape) if needs_buffer else o
        if g.dtype is wide:
            torch.mul(g, drop.scale, out=du)
        else:
            du.copy_(g)  # mul(bfloat16, scale, out=float32) would round before it stores
            if drop.scale != 1.0:
                du.mul_(drop.scale)
        drop(du)
        if needs_buffer and o is not None:
            o.copy_(du)
        if sums is not None:
            sums.add(du, total)
    return dx, None if sums is None else sums.result()


def _supports_slabs(x: Tensor) -> bool:
    """Return True if slabs can be used for ``x``.

    Slabs read the value of the seed, which on another device waits for the device. They also view an int64 as two
    int32, which depends on the byte order.
    """
    return x.is_cpu and sys.byteorder == "little"


def _drops_all(p: float, seed: Tensor | None) -> bool:
    return seed is not None and threshold(p) == 2**32


def _rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert ``t`` to ``dtype`` if that rounds. A widening conversion is left to the addition that follows."""
    return t if torch.promote_types(t.dtype, dtype) is dtype else t.to(dtype)


class _Dropout:
    """The mask and the scale of one call.

    Args:
        seed: as in the forward.
        p: as in the forward.
        size: number of elements of the largest slab.
    """

    def __init__(self, seed: Tensor | None, p: float, size: int) -> None:
        self.scale = 1.0 if seed is None else 1 / (1 - p)
        self._keep_mask = None if seed is None else KeepMask(int(seed.item()), p, size)
        self._next_index = 0  # slabs come in order, and each is a range of linear indices

    def __call__(self, u: Tensor) -> Tensor:
        """Set the dropped elements of the next slab to 0, in place. ``u`` is contiguous, float32 or float64."""
        if self._keep_mask is not None and u.numel():
            u.view(_INTEGER_DTYPE[u.dtype]).mul_(self._keep_mask(self._next_index, u.numel()).view(u.shape))
            self._next_index += u.numel()
        return u

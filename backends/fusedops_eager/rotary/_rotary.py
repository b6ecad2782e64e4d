"""Rotary position embedding in plain torch: any device, fast on a CPU.

Halves: ``y = x * (c, c, 1)``, then ``-x2 * s`` is added to the first half and ``x1 * s`` to the second: three torch
calls, where the chain of models has five, and nothing is allocated but the result. Interleaved on a CPU: one product of
complex numbers, as the halves of a pair are two elements apart, which ATen's loops do not vectorize. On a CPU, large
tensors are processed in slabs, those of 16 bits through buffers in float32. cos and sin are converted to the compute
dtype once: they have one entry for each pair of a position, far fewer than q and k have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, promoted
from fusedops_eager._bias import slab_elements, with_rank
from fusedops_eager._gated import views, widened
from fusedops_eager._slabs import Buffers, pieces


def rotary_embedding(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int
) -> tuple[Tensor, Tensor]:
    """Compute the op on any device, for any number of rotated pairs."""
    rotated_q = rotate(q, cos, sin, interleaved, seq_dim)
    return rotated_q, q.new_empty(0) if k is None else rotate(k, cos, sin, interleaved, seq_dim)


def rotary_embedding_backward(
    grad_rotated_q: Tensor,
    grad_rotated_k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    seq_dim: int,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of q and k: the rotation by the opposite angles."""
    dq = rotate(grad_rotated_q, cos, sin, interleaved, seq_dim, sign=-1) if needs[0] else None
    return dq, rotate(grad_rotated_k, cos, sin, interleaved, seq_dim, sign=-1) if needs[1] else None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int, sign: int = 1) -> Tensor:
    """Rotate the pairs of one tensor.

    Args:
        x: (..., N, S, D), or (..., S, N, D) with seq_dim -3, floating, any strides.
        cos: (..., S, R/2), floating.
        sin: the same.
        interleaved: a pair is an even element and the next one.
        seq_dim: the dim of S.
        sign: -1 rotates by the opposite angles.

    Returns:
        The shape and dtype of x, contiguous.
    """
    wide = compute_dtype(torch.promote_types(x.dtype, promoted(cos, sin)))
    heads = -3 if seq_dim == -2 else -2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if cos.numel() == 0 or x.numel() == 0:
        return out.copy_(x)
    c, s = (with_rank(angle.resolve_neg().to(wide).unsqueeze(heads), x.dim()) for angle in (cos, sin))
    assert c is not None
    assert s is not None
    if not x.is_cpu:
        _on_device(out, x, c, s, interleaved, sign)
    elif interleaved:
        _interleaved(out, x, torch.complex(c, s if sign > 0 else -s))
    else:
        _halves(out, x, c, s, sign)
    return out


def _on_device(out: Tensor, x: Tensor, c: Tensor, s: Tensor, interleaved: bool, sign: int) -> None:
    """Compute the op without slabs, and without complex numbers, which not every device has."""
    width = 2 * c.shape[-1]
    (x1, x2), (o1, o2) = (views(t[..., :width], None, interleaved) for t in (x, out))
    x1, x2 = x1.to(c.dtype), x2.to(c.dtype)
    o1.copy_(torch.addcmul(x1 * c, x2, s, value=-sign))
    o2.copy_(torch.addcmul(x2 * c, x1, s, value=sign))
    out[..., width:].copy_(x[..., width:])


def _halves(out: Tensor, x: Tensor, c: Tensor, s: Tensor, sign: int) -> None:
    wide, width = c.dtype, 2 * c.shape[-1]
    factor = torch.cat((c, c, c.new_ones(*c.shape[:-1], x.shape[-1] - width)), -1)
    narrow = x.dtype is not wide
    size = slab_elements(x.numel(), 2 * wide.itemsize if narrow else wide.itemsize, x.dtype.itemsize)
    buffers = Buffers(max(size, x.shape[-1]), wide)  # no row is cut
    for o, x_part, f_part, s_part in pieces(size, out, x, factor, s, rows=True):
        a = widened(x_part, buffers(0, o.shape)) if narrow else x_part
        y = buffers(1, o.shape) if narrow else o
        torch.mul(a, f_part, out=y)
        (a1, a2), (y1, y2) = (views(t[..., :width], None, False) for t in (a, y))
        y1.addcmul_(a2, s_part, value=-sign)
        y2.addcmul_(a1, s_part, value=sign)
        if narrow:
            o.copy_(y)


def _interleaved(out: Tensor, x: Tensor, turn: Tensor) -> None:
    wide, width = turn.real.dtype, 2 * turn.shape[-1]
    if width < x.shape[-1]:
        out[..., width:].copy_(x[..., width:])
        out, x = out[..., :width], x[..., :width]
    direct = x.dtype is wide and not x.is_neg() and _has_complex_view(x) and _has_complex_view(out)
    size = slab_elements(x.numel(), wide.itemsize if direct else 2 * wide.itemsize, x.dtype.itemsize)
    buffers = Buffers(max(size, x.shape[-1]), wide)  # no row is cut
    for o, x_part, t_part in pieces(size, out, x, turn, rows=True):
        a = x_part if direct else buffers(0, o.shape).copy_(x_part)
        y = o if direct else buffers(1, o.shape)
        torch.mul(_complex(a), t_part, out=_complex(y))
        if not direct:
            o.copy_(y)


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))


def _has_complex_view(x: Tensor) -> bool:
    """Return True where each pair is one complex number in memory."""
    return x.stride(-1) == 1 and all(step % 2 == 0 for step in (x.storage_offset(), *x.stride()[:-1]))

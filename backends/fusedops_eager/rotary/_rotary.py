"""Rotary embedding in plain torch, on any device. Computed in float32 (float64 for float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.ops.rotary.formulas import pairs, rotation_dtype


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
    """Rotate the pairs of one tensor. Returns the shape and dtype of x, contiguous.

    Args:
        x: (..., N, S, D), or (..., S, N, D) with seq_dim -3, floating, any strides.
        cos: (..., S, R/2), floating.
        sin: the same.
        interleaved: a pair is an even element and the next one.
        seq_dim: the dim of S.
        sign: -1 rotates by the opposite angles.
    """
    wide, width, heads = rotation_dtype(x, cos, sin), 2 * cos.shape[-1], -3 if seq_dim == -2 else -2
    c, s = cos.to(wide).unsqueeze(heads), sin.to(wide).unsqueeze(heads)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (x1, x2), (y1, y2) = (pairs(t[..., :width], interleaved) for t in (x, out))
    x1, x2 = x1.to(wide), x2.to(wide)
    y1.copy_(torch.addcmul(x1 * c, x2, s, value=-sign))
    y2.copy_(torch.addcmul(x2 * c, x1, s, value=sign))
    out[..., width:].copy_(x[..., width:])
    return out

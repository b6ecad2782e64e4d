"""The formulas of rotary_embedding: the rotation of pairs of elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, promoted


def pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and the second elements of the pairs in the last dim."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def joined(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    """Return a tensor whose pairs have these elements."""
    if not interleaved:
        return torch.cat((first, second), -1)
    # not flatten, for which is_grads_batched=True has no rule
    return torch.stack((first, second), -1).reshape(*first.shape[:-1], 2 * first.shape[-1])


def rotation_dtype(x: Tensor, cos: Tensor, sin: Tensor) -> torch.dtype:
    """Return the dtype in which x is rotated: float64 where one of the tensors has it."""
    return compute_dtype(torch.promote_types(x.dtype, promoted(cos, sin)))


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int) -> Tensor:
    """Compute the rotation of one tensor."""
    wide, width = rotation_dtype(x, cos, sin), 2 * cos.shape[-1]
    heads = -3 if seq_dim == -2 else -2
    c, s = cos.to(wide).unsqueeze(heads), sin.to(wide).unsqueeze(heads)
    # all in the wide dtype, also what does not rotate: under autocast cat and stack take no float16 beside bfloat16
    whole = x.to(wide)
    x1, x2 = pairs(whole[..., :width], interleaved)
    y = joined(x1 * c - x2 * s, x2 * c + x1 * s, interleaved)
    return torch.cat((y, whole[..., width:]), -1).to(x.dtype)


def empty(q: Tensor, k: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty outputs."""
    like = torch.empty_like(q, memory_format=torch.contiguous_format)
    return like, q.new_empty(0) if k is None else torch.empty_like(k, memory_format=torch.contiguous_format)

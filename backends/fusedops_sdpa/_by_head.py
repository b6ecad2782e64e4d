"""The op's formula, one key head of one batch entry at a time: for the rare calls that torch's kernel gets wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops.dtypes import compute_dtype


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: str
) -> tuple[Tensor, Tensor]:
    """Return out and lse."""
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=compute_dtype(q.dtype))
    for at, of_keys, part in _parts(q, k, mask):
        args = (q[at], k[of_keys], v[of_keys], part, scale, causal, None, True)
        out[at], lse[at] = ops.OPS["attention"].reference(*args)
    return out, lse


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, where lse has none."""
    results = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k, v)]
    for at, of_keys, part in _parts(q, k, mask):
        none: Any = None  # out and the gradient of lse are not read
        args = (q[at], k[of_keys], v[of_keys], part, none, none, scale, causal, None, False, (True, True, True))
        each: Any = ops.OPS["attention"].backward(grad_out[at], none, *args)
        for whole, where, gradient in zip(results, (at, of_keys, of_keys), each):
            whole[where] = gradient
    return results[0], results[1], results[2]


def _parts(
    q: Tensor, k: Tensor, mask: Tensor | None
) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice], Tensor | None]]:
    """Yield where a part is in q, and in k and v, and its mask."""
    group = q.shape[1] // k.shape[1]
    whole = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    for b in range(q.shape[0]):
        for n in range(k.shape[1]):
            at = slice(b, b + 1), slice(n * group, (n + 1) * group)
            yield at, (at[0], slice(n, n + 1)), None if whole is None else whole[at]

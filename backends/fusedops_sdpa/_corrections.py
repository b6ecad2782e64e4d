"""The corrections that a CPU and CUDA share: empty tensors and fully masked rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype


def without_elements(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse of queries that have no key: 0 and -inf."""
    lse = q.new_full(q.shape[:3], -math.inf, dtype=compute_dtype(q.dtype))
    return q.new_zeros((*q.shape[:3], v.shape[3])), lse


def zero_gradients(tensors: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Return gradients of 0, where wanted."""
    each = (torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors)
    return tuple(gradient if need else None for gradient, need in zip(each, needs))


def dead_rows(bias: Tensor, queries: int, causal: bool) -> Tensor:
    """Return the rows that see no key, broadcastable to lse, by an additive mask of 0 and -inf with 4 dims."""
    masked = bias != 0
    nothing = masked.all(-1)
    if not causal:
        return nothing
    # a row sees a key if the first that is not masked is not after it
    first = masked.to(torch.uint8).argmin(-1)
    return nothing | (first > torch.arange(queries, device=bias.device))

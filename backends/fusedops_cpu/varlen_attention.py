"""varlen_attention in the compiled library: attention's functions (``src/attention.cpp``) on each sequence, by views.

So a sequence has the same bits beside others as alone. For few tokens: the keys of a sequence are read once for all
its query heads, as in a step of generation of several requests.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Dim, DType
from fusedops.ops.attention.arguments import sequences_of
from fusedops.ops.attention.formulas import heads_first
from fusedops_cpu import attention
from fusedops_cpu._calls import results_of

_LIMITS = (
    DType("q", torch.float32, torch.bfloat16, torch.float16),
    # of longer sequences, a kernel that computes tiles of queries and keys is faster
    Dim("q", (0,), at_most=64),
)
_SOURCE = "fusedops_cpu/src/attention.cpp"


@kernel(ops.varlen_attention, *_LIMITS, source=_SOURCE)
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    scale: float | None,
    causal: str,
    window: tuple[int, int] | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the op for up to 64 tokens and any number of keys."""
    out = q.new_zeros((*q.shape[:2], v.shape[2]))
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    for rows, keys in sequences_of(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]):
        own = heads_first(q[rows]), heads_first(k[keys]), heads_first(v[keys])
        results = results_of(attention.attention.function(*own, None, scale, causal, window, True))
        out[rows], lse[rows] = results[0][0].transpose(0, 1), results[1][0].transpose(0, 1)
    return out, lse


# the scores of all queries of a key head are kept at once
@kernel(ops.varlen_attention, *_LIMITS, Dim("k", (0,), at_most=1024), direction="backward", source=_SOURCE)
def varlen_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: str,
    window: tuple[int, int] | None,
    return_lse: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v from the scores, which are computed again."""
    gradients = [torch.zeros(x.shape, dtype=x.dtype) if need else None for x, need in zip((q, k, v), needs)]
    for rows, keys in sequences_of(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]):
        own = heads_first(q[rows]), heads_first(k[keys]), heads_first(v[keys])
        grads = heads_first(grad_out[rows]), grad_lse[rows].transpose(0, 1)[None]
        kept = heads_first(out[rows]), lse[rows].transpose(0, 1)[None]
        call = attention.attention_backward.function(
            *grads, *own, None, *kept, scale, causal, window, return_lse, needs
        )
        results: Any = results_of(call)
        for whole, part, at in zip(gradients, results, (rows, keys, keys)):
            if whole is not None:
                whole[at] = part[0].transpose(0, 1)
    return tuple(gradients)

"""varlen_attention in plain torch, without constraints: each sequence alone, by the computation of attention.

So a sequence has the same bits beside others as alone, and the memory is that of the longest one, in chunks.
"""

from __future__ import annotations

import math
from typing import cast

from torch import Tensor

from fusedops import kernel, ops
from fusedops.dtypes import compute_dtype, no_autocast
from fusedops.ops.attention.arguments import Sequence, sequences_of
from fusedops.ops.attention.formulas import heads_first
from fusedops_eager._attention import attention_backward, attention_forward

_SOURCE = "fusedops_eager/_attention.py"


@kernel(ops.varlen_attention, source=_SOURCE)
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
    """Compute the op on any device, for any sizes: the lengths are read, for which an accelerator is waited for."""
    out = q.new_zeros((*q.shape[:2], v.shape[2]))
    lse = q.new_full(q.shape[:2], -math.inf, dtype=compute_dtype(q.dtype))
    with no_autocast(q.device.type):
        for each in sequences_of(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]):
            tensors = _of_sequence(each, q, k, v)
            results = attention_forward(*tensors, None, scale, causal, window)
            out[each.queries], lse[each.queries] = results[0][0].transpose(0, 1), results[1][0].transpose(0, 1)
    return out, lse


@kernel(ops.varlen_attention, direction="backward", source=_SOURCE)
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
    """Compute the gradients of q, k and v."""
    gradients = [each.new_zeros(each.shape) if need else None for each, need in zip((q, k, v), needs)]
    with no_autocast(q.device.type):
        for each in sequences_of(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]):
            tensors, rows = _of_sequence(each, q, k, v), each.queries
            grad_rows, out_rows = heads_first(grad_out[rows]), heads_first(out[rows])
            lse_rows = lse[rows].transpose(0, 1)[None]
            lse_grad = grad_lse[rows].transpose(0, 1)[None] if return_lse else None
            options = (None, out_rows, lse_rows, scale, causal, window, needs)
            results = attention_backward(grad_rows, lse_grad, *tensors, *options)
            for whole, part, at in zip(gradients, results, (each.queries, each.keys, each.keys)):
                if whole is not None:
                    whole[at] = cast("Tensor", part)[0].transpose(0, 1)
    return tuple(gradients)


def _of_sequence(each: Sequence, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of a sequence's queries, keys and values, (1, N, S, D)."""
    return heads_first(q[each.queries]), heads_first(k[each.keys]), heads_first(v[each.keys])

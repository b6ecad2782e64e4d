"""A stand-in for torch's FlashAttention 2 of packed sequences, on CPU tensors: flash-attn's formula, as strict."""

from __future__ import annotations

from typing import Any

import torch
from flash_attn_formula import packed, packed_backward, packed_forward, require
from torch import Tensor


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Any, ...]:
    require(not dropout_p and not return_debug_mask, "not in the stand-in")
    given = packed(query, key, (cum_seq_q, cum_seq_k), (max_q, max_k))
    options = (scale, is_causal, window_size_left, window_size_right)
    out, lse = packed_forward(2, query, key, value, given, *options)
    seed, unused = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    return torch.empty_like(query).copy_(out), lse, seed, unused, query.new_empty(0)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    require(not dropout_p, "not in the stand-in")
    require(logsumexp.is_contiguous() and logsumexp.shape == (query.shape[1], query.shape[0]), "logsumexp is read so")
    given = packed(query, key, (cum_seq_q, cum_seq_k), (max_q, max_k))
    options = (scale, is_causal, window_size_left, window_size_right)
    results = packed_backward(2, query, key, value, grad_out, out, logsumexp, given, *options)
    dq, dk, dv = (torch.empty_like(each).copy_(part) for each, part in zip((query, key, value), results))
    return dq, dk, dv

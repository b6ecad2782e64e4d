"""The launches of select_keys and sparse_attention that ``triton_aot.py`` compiles."""

from __future__ import annotations

from typing import Any

import torch


def launch_sparse(case: dict[str, Any]) -> None:
    """Make the launches of a case. op: "sparse_attention", or with " backward"; shape (B, Nq, Nk, Sq, Sk, D, Dv, K),
    dtype, and maybe mask ("heads": one for each head). Where D > Dv, v is a part of k.
    """
    from fusedops.ops.attention.arguments import SparseAttentionArgs, SparseAttentionGradArgs
    from fusedops_triton.attention import _sparse

    (batch, heads, key_heads, queries, keys, size, size_v, count), dtype = case["shape"], getattr(torch, case["dtype"])

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta").transpose(1, 2)  # (B, S, N, D) in memory

    q, k, out = (
        empty(batch, length, n, width)
        for length, n, width in ((queries, heads, size), (keys, key_heads, size), (queries, heads, size_v))
    )
    v = k[..., :size_v] if size > size_v else empty(batch, keys, key_heads, size_v)
    indices = empty(batch, queries, 1, count, of=torch.int32)
    mask = q.new_empty((batch, heads, queries, keys), dtype=torch.bool) if case.get("mask") else None
    tensors, options = (q, k, v, indices, mask), (None, "lower_right", None, True)
    if case["op"].endswith("backward"):
        lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
        a = SparseAttentionGradArgs(out, lse, *tensors, out, lse, *options, (True, True, True))
        _sparse.sparse_attention_backward(a)
    else:
        _sparse.sparse_attention(SparseAttentionArgs(*tensors, *options))


def launch_select(case: dict[str, Any]) -> None:
    """Make the launches of select_keys. shape (B, S, T, H, D, count), dtype, and maybe mask."""
    from fusedops.ops.attention.arguments import SelectKeysArgs
    from fusedops_triton.attention import _select

    (batch, queries, keys, heads, size, count), dtype = case["shape"], getattr(torch, case["dtype"])
    q = torch.empty((batch, queries, heads, size), dtype=dtype, device="meta")
    mask = q.new_empty((batch, queries, keys), dtype=torch.bool) if case.get("mask") else None
    weights = q.new_empty((batch, queries, heads), dtype=torch.float32)
    _select.select_keys(SelectKeysArgs(q, q.new_empty((batch, keys, size)), weights, count, 0.5, "lower_right", mask))

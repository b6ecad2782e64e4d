"""The launches of paged_attention and store_kv that ``triton_aot.py`` compiles."""

from __future__ import annotations

from typing import Any

import torch


def launch_paged(case: dict[str, Any]) -> None:
    """Make the launches of a case.

    op: "paged_attention"; shape (tokens, sequences, pages of a sequence, Nq, Nk, D), dtype, and maybe cache, a dtype of
    codes, whose scales are those of each token and head. Pages have 16 keys.
    """
    from fusedops.ops.attention.arguments import PagedAttentionArgs
    from fusedops_triton.attention import _paged

    tokens, sequences, columns, heads, key_heads, size = case["shape"]
    dtype, codes = getattr(torch, case["dtype"]), case.get("cache")
    of_cache = dtype if codes is None else getattr(torch, codes)
    q = torch.empty(tokens, heads, size, dtype=dtype, device="meta")
    cache = q.new_empty((sequences * columns, 16, key_heads, size), dtype=of_cache)
    scale = None if codes is None else q.new_empty((*cache.shape[:3], 1), dtype=torch.float32)
    shapes = ((sequences + 1,), (sequences, columns), (sequences,))
    bounds, table, used = (q.new_empty(shape, dtype=torch.int32) for shape in shapes)
    args = PagedAttentionArgs(q, cache, cache, bounds, table, used, scale, scale, causal="lower_right")
    _paged.paged_attention(args)


def launch_store(case: dict[str, Any]) -> None:
    """Make the launches of a case. op: "store_kv"; shape (tokens, pages, heads, D), dtype, cache, as above."""
    from fusedops.ops.attention.arguments import StoreKvArgs
    from fusedops_triton.attention import _store

    tokens, pages, heads, size = case["shape"]
    x = torch.empty(tokens, heads, size, dtype=getattr(torch, case["dtype"]), device="meta")
    cache = x.new_empty((pages, 16, heads, size), dtype=getattr(torch, case["cache"]))
    scale = x.new_empty(cache.shape[:3], dtype=torch.float32)
    _store.store_kv(StoreKvArgs(x, x, cache, cache, x.new_empty(tokens, dtype=torch.int64), scale, scale))

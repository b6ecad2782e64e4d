"""Continuous batching of transformers, whose keys and values are in a paged cache, by varlen_attention.

In each step the cache writes the new keys and values of all requests, and returns for each request those that it has to
see, one request after the other; the call has the bounds of the requests. So a query sees the keys of its request up to
its own, at the lower right of the two lengths, and with a window the last of them. The masks that a model makes are not
read: they are of the new tokens alone, and transformers' own implementations do not read them either.

The pages of a block table, which transformers passes to flash-attn's function for decoding alone, are refused.

Source: transformers, ``generation/continuous_batching`` and ``integrations/flash_attention.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.generation.continuous_batching import PagedAttentionCache

from fusedops import ops
from fusedops.errors import InvalidInputError
from fusedops.integrations._sinks import packed_with_sinks
from fusedops.integrations.transformers._attention.sequences import attention_of_sequences

# Of a sequence, which read keys in pages; for more they are gathered, and read once for a tile. paged_attention takes
# 0.63 to 0.75 of the time of both for 32 queries of 512 or 2,048 keys, 0.8 to 1.1 for 64 and 1.1 to 1.2 for 128 (1
# thread of an Intel Xeon with AVX-512 at load 4 to 7, paired turns).
FEW_QUERIES = 32
PAGED = ("cache", "read_index")  # the cache that a call has to update; of a call after that, what it has read


def is_paged(kwargs: dict[str, Any]) -> bool:
    """Return True for a call of continuous batching."""
    return any(kwargs.get(name) is not None for name in PAGED)


def of_paged_cache(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, reason: str | None, kwargs: Any
) -> Tensor:
    """Return the attention of new tokens of several requests, (1, T, N, Dv), and write their keys and values.

    Since transformers 5.24 the models write them: the call has no cache, and key and value are those of the requests.

    Args:
        module: the attention module; its ``layer_idx`` is the layer of the cache.
        query: (1, N, T, D).
        key: (1, Nk, T, D).
        value: (1, Nk, T, Dv).
        scaling: of the scores.
        reason: what varlen_attention has no parameter for, or None.
        kwargs: of the call; the cache writes the layer's own bounds into them.
    """
    cache: Any = kwargs.get("cache")
    if cache is not None and not isinstance(kwargs["cache"], PagedAttentionCache):
        reason = f"of type {type(cache).__name__}"
    elif kwargs.get("block_table") is not None:
        reason = "with a block table"
    elif reason is not None:
        reason = f"with {reason}"
    if reason is not None:
        raise InvalidInputError(
            f'attention implementation "fusedops": got a paged cache {reason} (cache), expected a PagedAttentionCache '
            "that returns the keys and values of each request in their order, and causal attention with nothing but "
            'windows and sinks; to fix: set_attn_implementation("paged|eager")'
        )
    window = None if kwargs.get("sliding_window") is None else (kwargs["sliding_window"] - 1, 0)
    sinks: Tensor | None = kwargs.get("s_aux")
    if cache is not None and _reads_pages(cache, module.layer_idx, kwargs):
        return _of_pages(cache, module.layer_idx, (query, key, value), window, scaling, sinks, kwargs)
    if cache is not None:
        new = {"key_states": key, "value_states": value, "layer_idx": module.layer_idx, "kwargs": kwargs}
        key, value = cast("tuple[Tensor, Tensor]", cache.update(**new))
    bounds = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    return attention_of_sequences(query, key, value, bounds, window, scaling, sinks)


def _reads_pages(cache: PagedAttentionCache, layer: int, kwargs: dict[str, Any]) -> bool:
    """Return True for a step of a few tokens of each request that has keys, all of which are in the cache after it."""
    allocator: Any = cache.layer_to_allocator[layer]
    if not len(kwargs["read_index"][allocator.index]):
        return False
    if not allocator.supports_block_table:  # of a window, in a ring: a second token replaces a key of the first one
        return kwargs["max_length_q"] == 1
    if kwargs["max_length_q"] <= FEW_QUERIES:
        return True
    bounds = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"][allocator.layer_type]
    if not all(each.is_cpu for each in bounds):
        return False
    queries, keys = (each.long().diff() for each in bounds)
    return int((queries * keys).sum()) <= FEW_QUERIES * int(keys.sum())  # a long prompt may be beside many tokens


class _Places(NamedTuple):
    """Where the keys of a step are, the same in each layer of an allocator.

    Attributes:
        slots: (T,), of the new tokens.
        table: (B, M), the pages of each request.
        used: (B,), the keys of each request.
    """

    slots: Tensor
    table: Tensor
    used: Tensor


_known: WeakKeyDictionary[PagedAttentionCache, dict[Any, tuple[Any, _Places]]] = WeakKeyDictionary()


def _places(cache: PagedAttentionCache, allocator: Any, kwargs: dict[str, Any], pages: int, size: int) -> _Places:
    """Return where the keys are, from the indices of all of them, which transformers makes for each step."""
    of_cache = _known.setdefault(cache, {})
    step, known = of_cache.get(allocator.index, (None, None))
    if known is None or step is not kwargs["read_index"]:
        bounds = kwargs["cu_seq_lens_k"][allocator.layer_type].long()
        read, write = (kwargs[name][allocator.index].long() for name in ("read_index", "write_index"))
        if not allocator.supports_block_table:  # the places of new tokens are marked
            read = read.masked_scatter(read == allocator.sentinel_index, write)
        columns = torch.arange(-(-kwargs["max_length_k"][allocator.layer_type] // size), device=bounds.device) * size
        first = (bounds[:-1, None] + columns).clamp(max=len(read) - 1)  # of each page; past a request it is not read
        slots = write.where(write < pages * size, -1)
        known = _Places(slots, torch.div(read[first], size, rounding_mode="floor"), bounds.diff())
        of_cache[allocator.index] = kwargs["read_index"], known
    return known


def _of_pages(
    cache: PagedAttentionCache,
    layer: int,
    new: tuple[Tensor, Tensor, Tensor],
    window: tuple[int, int] | None,
    scaling: float | None,
    sinks: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Return the attention to keys where they lie in the pages of the cache; those of the new tokens are written."""
    from transformers.generation.continuous_batching.cache_allocators.full_attention import FullAttentionCacheAllocator

    allocator: Any = cache.layer_to_allocator[layer]
    pages: tuple[Tensor, Tensor]
    if allocator.supports_block_table:
        pages = allocator.get_cache_for_block_table(layer)
    else:
        k_pages, v_pages = FullAttentionCacheAllocator.get_cache_for_block_table(allocator, layer)
        pages = k_pages.flatten(0, 1)[:, None], v_pages.flatten(0, 1)[:, None]  # a ring begins anywhere in a page
    slots, table, used = _places(cache, allocator, kwargs, *pages[0].shape[:2])
    q, k, v = (each[0].transpose(0, 1) for each in new)
    ops.store_kv(k, v, *pages, slots)
    options: dict[str, Any] = {"scale": scaling, "causal": "lower_right", "window": window}
    results: Any = ops.paged_attention(
        q, *pages, kwargs["cu_seq_lens_q"], table, used, return_lse=sinks is not None, **options
    )
    out: Tensor = results if sinks is None else packed_with_sinks(results[0], results[1], sinks)
    return out[None]

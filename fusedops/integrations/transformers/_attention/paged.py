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

FEW_QUERIES = 8  # of a sequence, which read keys in pages; for more they are gathered, and read once for a tile
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
    """Return True for a step of a few tokens of each request, whose keys are whole pages of the cache."""
    allocator: Any = cache.layer_to_allocator[layer]
    return (
        kwargs["max_length_q"] <= FEW_QUERIES
        and allocator.supports_block_table
        and len(kwargs["read_index"][allocator.index]) > 0
    )


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
    allocator: Any = cache.layer_to_allocator[layer]
    pages: tuple[Tensor, Tensor] = allocator.get_cache_for_block_table(layer)
    slots, table, used = _places(cache, allocator, kwargs, *pages[0].shape[:2])
    q, k, v = (each[0].transpose(0, 1) for each in new)
    ops.store_kv(k, v, *pages, slots)
    options: dict[str, Any] = {"scale": scaling, "causal": "lower_right", "window": window}
    results: Any = ops.paged_attention(
        q, *pages, kwargs["cu_seq_lens_q"], table, used, return_lse=sinks is not None, **options
    )
    out: Tensor = results if sinks is None else packed_with_sinks(results[0], results[1], sinks)
    return out[None]

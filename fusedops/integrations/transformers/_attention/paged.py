"""Continuous batching of transformers, whose keys and values are in a paged cache, by varlen_attention.

In each step the cache writes the new keys and values of all requests, and returns for each request those that it has to
see, one request after the other; the call has the bounds of the requests. So a query sees the keys of its request up to
its own, at the lower right of the two lengths, and with a window the last of them. The masks that a model makes are not
read: they are of the new tokens alone, and transformers' own implementations do not read them either.

The pages of a block table, which transformers passes to flash-attn's function for decoding alone, are refused.

Source: transformers, ``generation/continuous_batching`` and ``integrations/flash_attention.py``.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers.generation.continuous_batching import PagedAttentionCache

from fusedops.errors import InvalidInputError
from fusedops.integrations.transformers._attention.sequences import attention_of_sequences

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
    if cache is not None:
        new = {"key_states": key, "value_states": value, "layer_idx": module.layer_idx, "kwargs": kwargs}
        key, value = cast("tuple[Tensor, Tensor]", cache.update(**new))
    size = kwargs.get("sliding_window")
    window = None if size is None else (size - 1, 0)
    bounds = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    return attention_of_sequences(query, key, value, bounds, window, scaling, kwargs.get("s_aux"))

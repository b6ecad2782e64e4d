"""Attention of diffusers, by its dispatcher or by torch's function, by :func:`fusedops.attention`.

A mask is never left out: one that the op does not take, such as numbers added to the scores, goes with the call to the
function that the model has. So do calls under autocast and torch.compile, with another backend of diffusers, or
with a part of the sequence on each device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models import attention_dispatch
from torch import Tensor

from fusedops import ops
from fusedops.integrations.diffusers._served.taken import are_taken
from fusedops.masks import from_sdpa
from fusedops.tensor_cache import cached_for

_dispatch: Any = attention_dispatch
_NATIVE = _dispatch.AttentionBackendName.NATIVE


def attention(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute a call of diffusers' dispatcher, (B, S, N, D)."""
    if own is not _dispatch.dispatch_attention_fn:
        return own(*args, **kwargs)
    result = _dispatched(*args, **kwargs)
    return own(*args, **kwargs) if result is None else result


def sdpa(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute a call of torch's scaled_dot_product_attention, (B, N, S, D)."""
    if own is not torch.nn.functional.scaled_dot_product_attention:
        return own(*args, **kwargs)
    result = _attended(*args, **kwargs)
    return own(*args, **kwargs) if result is None else result


def _dispatched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: Any = None,
    parallel_config: Any = None,
) -> Tensor | None:
    active = _dispatch._AttentionBackendRegistry.get_active_backend()[0] if backend is None else backend
    if active != _NATIVE or parallel_config is not None or attention_kwargs or query.dim() != 4:
        return None
    if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    out = _attended(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return None if out is None else out.transpose(1, 2)


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return the attention of (B, N, S, D), or None for a call that the op does not take."""
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if not are_taken(*tensors) or dropout_p or (is_causal and attn_mask is not None):
        return None
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4 or not query.dtype == key.dtype == value.dtype:
        return None
    heads, shared = query.shape[1], key.shape[1]
    if heads != shared and not (enable_gqa and shared and heads % shared == 0):
        return None
    if value.shape[:3] != key.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        return None
    mask = None
    if attn_mask is not None:
        if attn_mask.dtype is not torch.bool or attn_mask.dim() not in (2, 4) or not _fits(attn_mask, query, key):
            return None
        mask = cached_for(attn_mask, "from_sdpa", lambda: from_sdpa(attn_mask))
    return ops.attention(query, key, value, mask, scale, causal="upper_left" if is_causal else False)


def _fits(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Return True where a mask is broadcast to (B, N, Sq, Sk)."""
    full = (*query.shape[:3], key.shape[2])[4 - mask.dim() :]
    return all(size in (1, whole) for size, whole in zip(mask.shape, full))

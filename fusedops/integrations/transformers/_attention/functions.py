"""fusedops as attention implementations of transformers: "fusedops" and "fusedops_softmax".

"fusedops" is :func:`fusedops.attention`; "fusedops_softmax" writes attention out, with
:func:`fusedops.scaled_masked_softmax`. The first takes masks, causal attention, windows and sinks. What it has no
parameter for (softcap, biases, dropout, the probabilities as a result) the second computes, with a warning that names
the reason; dropout on a GPU torch's own attention, whose kernels there have it. What neither can compute is an error.
Nothing is left out.

Source: transformers, ``integrations/sdpa_attention.py`` and ``eager_attention_forward`` of the models.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import (
    sdpa_attention_forward,  # pyright: ignore[reportUnknownVariableType]
)

from fusedops import ops
from fusedops._report.user_frame import user_stack_level
from fusedops._torch import TENSOR_TYPES, autocasts, is_traced, is_transformed
from fusedops.errors import FusedOpsWarning, InvalidInputError
from fusedops.integrations._sinks import with_sinks
from fusedops.integrations.transformers._attention.packed_cache import PackedKeys, of_packed_cache
from fusedops.integrations.transformers._attention.packed_mask import PackedMask
from fusedops.integrations.transformers._attention.paged import PAGED, is_paged, of_paged_cache
from fusedops.integrations.transformers._attention.sequences import attention_of_sequences
from fusedops.integrations.transformers._attention.sparse import chosen_keys, with_chosen_keys

ATTENTION, SOFTMAX = "fusedops", "fusedops_softmax"
_attributes = object.__getattribute__  # that of a config of transformers takes 0.6 us, its output_attentions 1.3
_OPTIONS = {*PAGED, "indices", "block_indices", "softcap", "position_bias", "output_attentions"}
_MANY_SCORES = 65_536


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module of transformers by :func:`fusedops.attention`.

    Args:
        module: the attention module; its ``is_causal`` is used where the argument is None.
        query: (B, N, Sq, D).
        key: (B, Nk, Sk, D).
        value: (B, Nk, Sk, Dv).
        attention_mask: True where a key is seen, as :func:`transformers.masking_utils.sdpa_mask` makes it; or that of
            packed sequences, which :func:`fusedops.varlen_attention` computes; or added to the scores; or None. Not
            read beside a paged ``cache``.
        dropout: of the probabilities.
        scaling: of the scores; None: ``1 / sqrt(D)``.
        is_causal: without a mask, each query sees the keys up to its own.
        **kwargs: ``sliding_window``, ``softcap``, ``s_aux`` (sinks), ``position_bias``, ``output_attentions``, and
            ``indices`` or ``block_indices`` of the keys that each query sees, ``cache`` of continuous batching with its
            bounds; others do not change the result.

    Returns:
        (B, Sq, N, Dv), and None or the probabilities.

    Raises:
        InvalidInputError: an argument cannot be served.

    >>> q = torch.zeros(1, 2, 3, 4)
    >>> attention_forward(torch.nn.Identity(), q, q, q, None)[0].shape
    torch.Size([1, 3, 2, 4])
    """
    # every call that can be left out counts: the weights that are read between two layers evict this code from the
    # cache, and a call then takes some ten times as long as in a loop
    probabilities = _gives_probabilities(module)
    reason = indices = None
    if type(key) is PackedKeys:
        reason = _reason_for_softmax(attention_mask, dropout, {"output_attentions": probabilities, **kwargs})
        if is_causal is False or any(kwargs.get(name) is not None for name in ("indices", "block_indices")):
            reason = "keys that are chosen" if is_causal is not False else "is_causal = False"
        out = of_packed_cache(query, key, value, scaling, attention_mask, reason, kwargs.get("s_aux"))
        if out is not None:
            return out, None
        key = key.added[0]  # of a prompt, as they are
    if probabilities or _is_additive(attention_mask) or not _OPTIONS.isdisjoint(kwargs):
        options = {"output_attentions": probabilities, **kwargs}
        if is_paged(kwargs):
            reason = _reason_for_softmax(None, dropout, options)
            reason = "is_causal = False" if reason is None and is_causal is False else reason
            return of_paged_cache(module, query, key, value, scaling, reason, kwargs), None
        if _is_additive(attention_mask) and not attention_mask.is_floating_point():
            return sdpa_attention_forward(module, query, key, value, attention_mask)  # the error is torch's
        causal = attention_mask is None and _is_causal(module, query, is_causal)
        reason = _reason_for_softmax(attention_mask, 0.0, options)
        if reason is None and not dropout and type(attention_mask) is not PackedMask:
            indices = chosen_keys(module, query, key, kwargs)
        if indices is None:
            attention_mask = with_chosen_keys(module, query, key, attention_mask, causal, kwargs)
    sinks: Tensor | None = kwargs.get("s_aux")
    if reason is None and sinks is None and dropout > 0 and _takes_dropout(query):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    if reason is not None or dropout > 0:
        reason = _reason_for_softmax(attention_mask, dropout, {"output_attentions": probabilities, **kwargs})
        warnings.warn(
            f"attention implementation {ATTENTION!r}: got {reason}, expected what fusedops.attention takes; "
            f"{SOFTMAX!r} computes the call; to fix: {_fix(dropout)}, or set_attn_implementation({SOFTMAX!r})",
            FusedOpsWarning,
            # a traced call has no frames to read
            stacklevel=2 if torch.compiler.is_compiling() else user_stack_level("transformers"),
        )
        out, weights = softmax_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
        return out, weights if probabilities or kwargs.get("output_attentions") else None  # as the calls of the op
    query, key, value = _of_one_dtype(query, key, value)
    if isinstance(attention_mask, PackedMask) and attention_mask.sequences is not None:
        bounds, window, causal = attention_mask.sequences
        size: int | None = None if causal else kwargs.get("sliding_window")
        window = window if size is None else (size - 1, size - 1)
        return attention_of_sequences(query, key, value, (bounds, None), window, scaling, sinks, causal), None
    causal, window = False, None
    if attention_mask is None:
        causal = _is_causal(module, query, is_causal)
        if causal and indices is None:
            key, value = _seen(key, query, causal), _seen(value, query, causal)
        if "sliding_window" in kwargs:
            window = _window(kwargs["sliding_window"], query, key, causal)
    mask = None if attention_mask is None else attention_mask.logical_not()
    # a query of one token sees the window that ends with the last key
    alignment = "lower_right" if window is not None and not causal else "upper_left" if causal else False
    if sinks is None:
        out = ops.attention(query, key, value, mask, scaling, causal=alignment, window=window, indices=indices)
    else:
        out, lse = ops.attention(
            query, key, value, mask, scaling, causal=alignment, window=window, return_lse=True, indices=indices
        )
        out = with_sinks(out, lse, sinks)
    return out.transpose(1, 2).contiguous(), None


def softmax_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module of transformers by :func:`fusedops.scaled_masked_softmax`.

    Args and Returns are those of :func:`attention_forward`; the probabilities are returned.

    >>> q = torch.zeros(1, 2, 3, 4)
    >>> softmax_forward(torch.nn.Identity(), q, q, q, None)[1][0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    if is_paged(kwargs):
        raise InvalidInputError(
            f"attention implementation {SOFTMAX!r}: got a paged cache (cache), expected keys and values as tensors and "
            f"a mask; to fix: set_attn_implementation({ATTENTION!r}), which takes one, or another implementation"
        )
    position_bias: Tensor | None = kwargs.get("position_bias")
    query, key, value = _of_one_dtype(query, key, value)
    causal = attention_mask is None and _is_causal(module, query, is_causal)
    attention_mask = with_chosen_keys(module, query, key, attention_mask, causal, kwargs)
    causal = causal and attention_mask is None
    key, value = _seen(key, query, causal), _seen(value, query, causal)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # a repeat of one copies
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores, scale = query @ key.mT, query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    biases = [position_bias, attention_mask if _is_additive(attention_mask) else None]
    if softcap is not None or sinks is not None or any(bias is not None for bias in biases):
        scores, scale = scores if scale == 1.0 else scores * scale, 1.0
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if position_bias is not None and position_bias.shape[-1] > scores.shape[-1]:
            biases[0] = position_bias[..., : scores.shape[-1]]
        for bias in biases:
            if bias is not None:
                is_added = bias.dtype == scores.dtype or bias.is_complex()  # the error of a complex one is torch's
                scores = _sum(scores, bias if is_added else bias.to(scores.dtype))
    mask = None if attention_mask is None or _is_additive(attention_mask) else attention_mask.logical_not()
    if attention_mask is None:
        mask = _window_mask(kwargs.get("sliding_window"), query, key, causal)
    if sinks is not None:
        scores, mask = _with_sinks(scores, sinks, mask, causal)
        causal = False
    weights = ops.scaled_masked_softmax(scores, mask, scale, causal=causal)
    weights = weights if sinks is None else weights[..., :-1]
    dropped = torch.nn.functional.dropout(weights, dropout) if dropout > 0 else weights
    return (dropped @ value).transpose(1, 2).contiguous(), weights


def _sum(scores: Tensor, bias: Tensor) -> Tensor:
    """Return the sum, in the memory of the scores where they are many: new pages take as long as the sum itself.

    No function that made the scores reads them in backward.
    """
    if type(scores) not in TENSOR_TYPES or is_traced() or scores.numel() < _MANY_SCORES or is_transformed():
        return scores + bias
    fits = torch.broadcast_shapes(scores.shape, bias.shape) == scores.shape
    return scores.add_(bias) if fits else scores + bias


def _takes_dropout(query: Tensor) -> bool:
    """Return True where torch's fused kernels of attention take a dropout."""
    return query.is_cuda


def _gives_probabilities(module: Any) -> bool:
    """Return True where the config of a module asks for the probabilities."""
    config: Any = module.__dict__.get("config")  # getattr of a module without one takes 1 us
    return config is not None and bool(_attributes(config, "__dict__").get("_output_attentions"))


def _reason_for_softmax(attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> str | None:
    """Return what fusedops.attention has no parameter for, or None."""
    if dropout > 0:
        return f"dropout = {dropout:g}"
    if kwargs.get("softcap") is not None:
        return f"softcap = {kwargs['softcap']:g}"
    if kwargs.get("position_bias") is not None:
        return "a position_bias"
    if _is_additive(attention_mask):
        return "a mask that is added to the scores"
    return "output_attentions = True" if kwargs.get("output_attentions") else None


def _fix(dropout: float) -> str:
    if dropout > 0:
        return "set the dropout of attention in the model's config, such as attention_probs_dropout_prob, to 0"
    return "leave it out"


def _is_additive(mask: Tensor | None) -> TypeGuard[Tensor]:
    return mask is not None and mask.dtype != torch.bool


def _of_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return query, key and value with the dtype of autocast, as torch's own attention does, and of one batch."""
    kind, batch = tensors[0].device.type, tensors[1].shape[0]
    if autocasts(kind):
        tensors = tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)
    if tensors[0].shape[0] == batch:  # an expand that changes nothing takes 1 us
        return tensors
    return (tensors[0].expand(batch, -1, -1, -1), *tensors[1:])


def _is_causal(module: Any, query: Tensor, is_causal: bool | None) -> bool:
    """Return True where a call without a mask is causal: not for one token, which sees every key."""
    if query.shape[2] < 2:
        return False
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _seen(keys: Tensor, query: Tensor, causal: bool) -> Tensor:
    """Return the keys that a causal call without a mask sees: a cache of a fixed size has empty ones after them."""
    return keys[:, :, : query.shape[2]] if causal and keys.shape[2] > query.shape[2] else keys


def _window(size: int | None, query: Tensor, key: Tensor, causal: bool) -> tuple[int, int] | None:
    """Return the window of a call without a mask, None where it takes in every key."""
    if size is None or size >= key.shape[2]:
        return None
    if not causal and query.shape[2] > 1:
        raise InvalidInputError(
            f"attention implementation {ATTENTION!r}: got sliding_window = {size} without a mask for attention that is "
            "not causal, expected a mask, in which the window is; to fix: pass attention_mask"
        )
    return size - 1, 0


def _window_mask(size: int | None, query: Tensor, key: Tensor, causal: bool) -> Tensor | None:
    """Return the mask of the keys before the window of a call without a mask."""
    window = _window(size, query, key, causal)
    if window is None:
        return None
    keys = torch.arange(key.shape[2], device=key.device)
    last = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=key.device)
    return keys < last[:, None] - window[0]


def _with_sinks(scores: Tensor, sinks: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor | None]:
    """Return scores with a column of sinks, which no mask covers, and the mask of all of them."""
    column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
    if causal:
        size = scores.shape[-1]
        later = torch.ones(scores.shape[-2], size, dtype=torch.bool, device=scores.device).triu(1)
        mask = later if mask is None else mask | later
    padded = None if mask is None else torch.nn.functional.pad(mask, (0, 1))
    return torch.cat((scores, column), -1), padded

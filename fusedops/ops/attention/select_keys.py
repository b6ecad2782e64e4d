"""The keys that an indexer chooses for each query (DeepSeek-AI 2025, DeepSeek-V3.2), for a sparse attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops import masks
from fusedops._contract.op import Op
from fusedops._contract.values import Output
from fusedops._dispatch.call import call
from fusedops.constraints import Alignment, Finite, Floating, LeadingDims, Mask, Rank, SameDevice, SameDType
from fusedops.dtypes import arithmetic, no_autocast
from fusedops.ops.attention import arguments, formulas
from fusedops.ops.attention.arguments import KeyCount, SelectKeysArgs, SharedKeys, VisibleKeys


def select_keys(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    count: int,
    *,
    scale: float = 1.0,
    causal: bool | str = False,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Choose the ``count`` keys of the largest ``sum over h of weights[h] * relu(scale * q[h] @ k)`` for each query.

    The scores of all queries and keys never exist at once. There are no gradients.

    Args:
        q: (B, S, H, D), the heads of the indexer, float16, bfloat16, float32 or float64.
        k: (B, T, D), the dtype of ``q``: one key for all heads.
        weights: (B, S, H), of each head, any of the same dtypes.
        count: at least 1.
        scale: of the products, a number, finite in float32.
        causal: "upper_left" or "lower_right", True where S == T alone, or False, as of :func:`fusedops.attention`.
        mask: bool or uint8, broadcastable to (B, S, T); True or non-zero means that the key is not visible.
        backend: a policy for this call alone, such as "cpu" or "triton,eager". None: the policy in effect.

    Returns:
        (B, S, count), int32, contiguous: the indices of the chosen keys, which are visible, in rising order, and -1
        after the last where fewer are. Of equal scores the lowest index is chosen; NaN is larger than any number.
        Scores are computed in float32 (float64 if an argument is): which of two that differ by a rounding is larger
        depends on the backend.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: transformers, ``models/deepseek_v32/modeling_deepseek_v32.py``.

    >>> import torch, fusedops
    >>> q, k = torch.ones(1, 2, 1, 1), torch.tensor([[[1.0], [-1.0], [3.0]]])
    >>> fusedops.select_keys(q, k, torch.ones(1, 2, 1), 2, causal="upper_left")
    tensor([[[ 0, -1],
             [ 0,  1]]], dtype=torch.int32)
    """
    args = (q, k, weights, count, scale, "none" if causal is False else causal, mask)
    result: Tensor = call(OP, args if causal is False else prepare_args(args), backend)
    return result


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with ``causal`` as a text: True where S == T is "upper_left", False is "none"."""
    causal = args[5]
    if causal is True and arguments.have_one_length(args[0], args[1]):
        text = "upper_left"
    elif causal is False:
        text = "none"
    else:
        return args  # a constraint refuses any other value
    return (*args[:5], text, args[6])


def reference(a: SelectKeysArgs) -> Tensor:
    """Compute the op in plain torch."""
    with no_autocast(a.q.device.type):
        dtype = arithmetic(a.q, a.weights)
        q, k, weights = (each.detach().to(dtype) for each in (a.q, a.k, a.weights))
        products = torch.relu(a.scale * (q.transpose(1, 2) @ k[:, None].transpose(-2, -1)))
        scores = (weights.transpose(1, 2)[..., None] * products).sum(1)
    return formulas.best_keys(scores, hidden_of(a), a.count)


def hidden_of(a: SelectKeysArgs) -> Tensor | None:
    """Return True for each key that a query does not see, broadcastable to (B, S, T), or None."""
    queries, keys = a.q.shape[1], a.k.shape[1]
    hidden = masks.from_band(queries, keys, masks.band(queries, keys, a.causal, None), a.q.device)
    if a.mask is None:
        return hidden
    return a.mask.bool() if hidden is None else hidden | a.mask.bool()


def empty(q: Tensor, k: Tensor, weights: Tensor, count: int, *rest: Any) -> Tensor:
    """Return an empty output."""
    return q.new_empty((*q.shape[:2], count), dtype=torch.int32)


OP = Op(
    select_keys,
    constraints=[
        Floating("q"),
        Floating("k"),
        Floating("weights"),
        Rank("q", 4),
        SameDevice("k", "q"),
        SameDevice("weights", "q"),
        SameDType("k", "q"),
        SharedKeys("k", "q"),
        LeadingDims("weights", "q"),
        KeyCount("count"),
        Finite("scale"),
        Alignment("causal", "q", "k", "upper_left", "lower_right", dim=1),
        Mask("mask"),
        SameDevice("mask", "q"),
        VisibleKeys("mask", "q", "k"),
    ],
    reference=reference,
    outputs=(Output("index", integer=True),),
    empty=empty,
    prepare_args=prepare_args,
    sharding="fusedops.ops.attention.sharding:SELECT",
    evidence="fusedops.ops.attention.evidence:SELECT",
)

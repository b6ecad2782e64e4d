"""Megatron's router and the products of its experts, with ops in their place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops.integrations.megatron._left import refusal, warn_left

_EPS = 1e-20  # which Megatron adds to a sum of scores
_SCORES = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}
_GROUP_SCORES = {1: "max", 2: "top2"}  # by the number of experts whose scores are added


def routing(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return topk_routing_with_score_function with :func:`fusedops.top_k_routing`."""
    signature = inspect.signature(own)

    @wraps(own)
    def topk_routing_with_score_function(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = SimpleNamespace(**bound.arguments)
        reason = _not_served(given)
        if reason is not None:
            warn_left("topk_routing_with_score_function", *reason)
            return own(*args, **kwargs)
        weights, index = _chosen(given)
        if getattr(given, "dense_output", False):
            return weights, index
        probs = torch.zeros_like(given.logits).scatter(1, index, weights)
        return probs, torch.zeros_like(given.logits, dtype=torch.bool).scatter(1, index, True)

    return topk_routing_with_score_function


def _not_served(given: SimpleNamespace) -> tuple[str, str, str] | None:
    """Return what the op does not compute, what it needs and the fix, or None."""
    if given.router_replay is not None:
        return "router_replay", "None", "turn off moe_enable_routing_replay"
    if given.score_function not in _SCORES:
        return f"score_function {given.score_function!r}", f"one of {', '.join(_SCORES)}", "choose one of these"
    if given.group_topk and given.topk // given.group_topk not in _GROUP_SCORES:
        needed = "a group's score that is its best one or the sum of its two best ones"
        return f"topk {given.topk} of {given.group_topk} groups", needed, "choose a topk of 1 or 2 for each group"
    return None


def _chosen(given: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the chosen experts, (tokens, topk), in the dtype of logits, and their indices."""
    of_softmax = given.score_function == "softmax"
    score: Any = _SCORES[given.score_function]
    if of_softmax and not given.use_pre_softmax:
        score = "topk_softmax"
    groups: dict[str, Any] = {}
    if given.group_topk:
        group_score = _GROUP_SCORES[given.topk // given.group_topk]
        groups = {"groups": given.num_groups, "top_groups": given.group_topk, "group_score": group_score}
    weights, index = ops.top_k_routing(
        given.logits,
        given.topk,
        score=score,
        bias=None if of_softmax else given.expert_bias,  # Megatron's own reads it of the other two alone
        normalize=not of_softmax and given.topk > 1,
        eps=0.0 if of_softmax else _EPS,
        scale=given.scaling_factor or 1.0,
        index=getattr(given, "precomputed_indices", None),
        **groups,
    )
    return weights.to(given.logits.dtype), index


def grouped(own: ModuleType) -> ModuleType:
    """Return grouped_gemm_util whose products are :func:`fusedops.grouped_matmul`, on every device."""
    module = ModuleType(own.__name__, own.__doc__)
    vars(module).update(vars(own))
    vars(module).update(
        ops=SimpleNamespace(gmm=gmm),
        grouped_gemm_is_available=lambda: True,
        assert_grouped_gemm_is_available=lambda: None,
    )
    return module


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
    """Return the products of grouped_gemm: each group of rows of ``a`` with the weight of its expert.

    Args:
        a: (tokens, K), sorted by expert, any floating dtype.
        b: (E, K, N), or (E, N, K) with ``trans_b``.
        batch_sizes: (E,), integers on any device: the tokens of each expert.
        trans_a: False.
        trans_b: as above.

    Returns:
        (tokens, N), the dtype of ``a``.

    Raises:
        InvalidInputError: ``trans_a``.

    Source: grouped_gemm, ``grouped_gemm/ops.py``.

    >>> gmm(torch.ones(3, 2), torch.tensor([[[1.0], [1.0]], [[2.0], [2.0]]]), torch.tensor([1, 2]))
    tensor([[2.],
            [4.],
            [4.]])
    """
    if trans_a:
        fix = "call the backward of the product: it has the gradient of the weights"
        raise refusal("gmm", "trans_a = True", "False", fix)
    return ops.grouped_matmul(a, b, batch_sizes.to(a.device).cumsum(0), transposed=not trans_b)

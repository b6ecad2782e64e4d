"""The choice of experts in a mixture (Shazeer et al. 2017, arXiv:1701.06538), and the weights of the chosen. Replaces
the routers of transformers, Megatron's TopKRouter, and torch_npu's npu_moe_gating_top_k.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Output, Sharding
from fusedops._dispatch.call import call
from fusedops.dtypes import compute_dtype, upcast
from fusedops.ops.routing import formulas
from fusedops.ops.routing.arguments import CONSTRAINTS, TopKRoutingArgs, TopKRoutingGradArgs


def top_k_routing(
    logits: Tensor,
    k: int,
    *,
    score: Literal["softmax", "sigmoid", "sqrt_softplus", "topk_softmax"] = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_score: Literal["top2", "max"] = "top2",
    normalize: bool = False,
    eps: float = 0.0,
    scale: float = 1.0,
    index: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose k experts for each row of logits, and compute their weights.

    The experts with the largest ``score + bias`` are chosen; their weights are the scores, without the bias:
    ``scale * s`` with ``s`` the scores of the chosen, or with ``normalize`` ``scale * (s / (sum(s) + eps))``.

    Ties go to the lowest index, among experts and among groups, on every backend: equal logits (and equal biases) are a
    tie. NaN is larger than any number. torch.topk leaves both open.

    Args:
        logits: (..., E), float16, bfloat16, float32 or float64.
        k: the experts of each row, from 1 to E.
        score: "softmax" over all E, "sigmoid", "sqrt_softplus" (``sqrt(log(1 + exp(z)))``), or "topk_softmax": the k
            largest logits are chosen, and the scores are a softmax over these k.
        bias: (E,), any of the same dtypes, or None. It takes part in the choice alone, and has no gradient.
        groups: the experts are cut into so many groups of neighbours, and those of the best groups alone are chosen.
        top_groups: the number of groups from which experts are chosen, from 1 to ``groups``.
        group_score: "top2", the sum of the two best experts of a group, as in DeepSeek-V3; "max", the best one, as in
            DeepSeek-V2. Experts are compared by ``score + bias``.
        normalize: the scores of the chosen are divided by their sum and ``eps``.
        eps: at least 0.
        scale: a factor of the weights.
        index: (..., k), int64 or int32, in [0, E): these experts are used, none is chosen, as in the replay of a
            router. An expert may be there twice.
        backend: a policy for this call alone, such as "cpu" or "triton,eager". None: the policy in effect.

    Returns:
        ``(weights, index)``. ``weights``: (..., k), float32 (float64 for float64), as all of the arithmetic. ``index``:
        (..., k), int64, by falling ``score + bias``. Both are contiguous. ``index`` has no gradient. The weights of a
        row with a given number outside [0, E) are NaN, and so is its gradient.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: transformers, ``models/deepseek_v3``, ``models/mixtral``, ``models/gpt_oss``; Megatron-LM,
    ``megatron/core/transformer/moe/moe_utils.py``; Wang et al. 2024, arXiv:2408.15664, for the bias.

    >>> import torch, fusedops
    >>> weights, index = fusedops.top_k_routing(torch.tensor([[1.0, 3.0, 2.0, 3.0]]), 2, normalize=True)
    >>> weights, index
    (tensor([[0.5000, 0.5000]]), tensor([[1, 3]]))
    """
    options = (score, bias, groups, top_groups, group_score, normalize, eps, scale, index)
    return call(OP, (logits, k, *options), backend)


def reference(a: TopKRoutingArgs) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch."""
    z = upcast(a.logits)
    scores = formulas.scores_of(z, a.score)
    if a.index is None:
        choices = scores.detach() if a.bias is None else scores.detach() + a.bias.detach().to(scores.dtype)
        chosen = formulas.chosen_of(choices, a.k, a.groups, a.top_groups, a.group_score)
    else:
        chosen = a.index.long()
    return formulas.weights_of(z, scores, chosen, a.score, a.normalize, a.eps, a.scale), chosen.clone()


def backward(a: TopKRoutingGradArgs) -> Tensor:
    """Compute the gradient of the logits, through the weights of the chosen."""
    return formulas.logits_gradient(a.grad_weights, a.logits, a.chosen, a.score, a.normalize, a.eps, a.scale).to(
        a.logits.dtype
    )


def weights_dtype(logits: Tensor, *rest: object) -> torch.dtype:
    """Return the dtype of the weights."""
    return compute_dtype(logits.dtype)


def empty(logits: Tensor, k: int, *rest: object) -> tuple[Tensor, Tensor]:
    """Return empty outputs."""
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape, dtype=compute_dtype(logits.dtype)), logits.new_empty(shape, dtype=torch.int64)


OP = Op(
    top_k_routing,
    constraints=CONSTRAINTS,
    reference=reference,
    backward=backward,
    differentiable=("logits",),
    outputs=("weights", Output("chosen", integer=True)),
    output_dtype=weights_dtype,
    empty=empty,
    sharding=Sharding(whole=(-1,), reason="the experts of a row are compared with each other"),
    evidence="fusedops.ops.routing.evidence:TOP_K_ROUTING",
)

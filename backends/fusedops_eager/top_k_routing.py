"""top_k_routing in plain torch, without constraints."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops.dtypes import upcast
from fusedops.ops.routing import formulas
from fusedops_eager._routing import largest, logits_gradient, scores_of, weights_of
from fusedops_eager._row_order import on_cpu


@kernel(
    ops.top_k_routing,
    source="torch.topk, fusedops_eager/_routing.py",
    rows_independent=on_cpu(),
)
def top_k_routing(
    logits: Tensor,
    k: int,
    score: str,
    bias: Tensor | None,
    groups: int,
    top_groups: int,
    group_score: str,
    normalize: bool,
    eps: float,
    scale: float,
    index: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Choose experts by torch.topk, and compute their weights."""
    z = upcast(logits)
    if index is None:
        scores = z if score == "topk_softmax" else scores_of(z, score)
        choices = scores if bias is None else scores + bias.to(scores.dtype)
        chosen = formulas.chosen_of(choices, k, groups, top_groups, group_score, largest).contiguous()
        picked = scores.gather(-1, chosen)
        if score == "topk_softmax":
            picked = torch.softmax(picked, -1)
        return weights_of(picked, normalize, eps, scale).contiguous(), chosen
    known, wrong = formulas.known_of(index, z.shape[-1])
    if score == "softmax":
        picked = torch.softmax(z, -1).gather(-1, known)
    else:
        picked = z.gather(-1, known)
        picked = torch.softmax(picked, -1) if score == "topk_softmax" else scores_of(picked, score)
    weights = weights_of(picked, normalize, eps, scale).masked_fill_(wrong, float("nan"))
    return weights.contiguous(), index.long().clone(memory_format=torch.contiguous_format)


@kernel(
    ops.top_k_routing,
    direction="backward",
    source="fusedops_eager/_routing.py",
    rows_independent=on_cpu(),
)
def top_k_routing_backward(
    grad_weights: Tensor, logits: Tensor, chosen: Tensor, k: int, score: str, normalize: bool, eps: float, scale: float
) -> Tensor:
    """Compute the gradient from the logits and the chosen experts."""
    gradient = logits_gradient(grad_weights, upcast(logits), chosen, score, normalize, eps, scale)
    return gradient.to(logits.dtype).contiguous()

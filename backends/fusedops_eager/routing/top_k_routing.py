"""top_k_routing in plain torch, without constraints."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops.dtypes import upcast
from fusedops.ops.routing import formulas
from fusedops.ops.routing.arguments import TopKRoutingArgs, TopKRoutingGradArgs
from fusedops_eager._row_order import on_cpu
from fusedops_eager.routing._routing import largest, logits_gradient, scores_of, weights_of


@kernel(
    ops.top_k_routing,
    source="torch.topk, fusedops_eager/routing/_routing.py",
    rows_independent=on_cpu(),
)
def top_k_routing(a: TopKRoutingArgs) -> tuple[Tensor, Tensor]:
    """Choose experts by torch.topk, and compute their weights."""
    z = upcast(a.logits)
    if a.index is None:
        scores = z if a.score == "topk_softmax" else scores_of(z, a.score)
        choices = scores if a.bias is None else scores + a.bias.to(scores.dtype)
        chosen = formulas.chosen_of(choices, a.k, a.groups, a.top_groups, a.group_score, largest).contiguous()
        picked = scores.gather(-1, chosen)
        if a.score == "topk_softmax":
            picked = torch.softmax(picked, -1)
        return weights_of(picked, a.normalize, a.eps, a.scale).contiguous(), chosen
    known, wrong = formulas.known_of(a.index, z.shape[-1])
    if a.score == "softmax":
        picked = torch.softmax(z, -1).gather(-1, known)
    else:
        picked = z.gather(-1, known)
        picked = torch.softmax(picked, -1) if a.score == "topk_softmax" else scores_of(picked, a.score)
    weights = weights_of(picked, a.normalize, a.eps, a.scale).masked_fill_(wrong, float("nan"))
    return weights.contiguous(), a.index.long().clone(memory_format=torch.contiguous_format)


@kernel(
    ops.top_k_routing,
    direction="backward",
    source="fusedops_eager/routing/_routing.py",
    rows_independent=on_cpu(),
)
def top_k_routing_backward(a: TopKRoutingGradArgs) -> Tensor:
    """Compute the gradient from the logits and the chosen experts."""
    gradient = logits_gradient(a.grad_weights, upcast(a.logits), a.chosen, a.score, a.normalize, a.eps, a.scale)
    return gradient.to(a.logits.dtype).contiguous()

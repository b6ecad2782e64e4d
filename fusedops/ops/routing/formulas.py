"""The formulas of a routing in plain torch: the scores of experts, the choice, the weights of the chosen.

Equal logits have equal scores, bit by bit, so that a tie is one on every backend. torch.sigmoid has not: on a CPU it
computes the last elements of a row by another function (torch 2.13). torch.exp, log1p and softmax have no such end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedops.dtypes import upcast

SCORES = ("softmax", "sigmoid", "sqrt_softplus", "topk_softmax")
GROUP_SCORES = ("top2", "max")


def exp_of_size(z: Tensor) -> Tensor:
    """Return exp(-abs(z)), whose derivative at 0 is that of exp(-z)."""
    return torch.exp(torch.where(z >= 0, -z, z))


def sigmoid(z: Tensor) -> Tensor:
    """Return the sigmoid of z."""
    e = exp_of_size(z)
    return torch.where(z >= 0, torch.ones_like(e), e) / (1 + e)


def sqrt_softplus(z: Tensor) -> Tensor:
    """Return sqrt(log(1 + exp(z)))."""
    return (torch.where(z >= 0, z, torch.zeros_like(z)) + torch.log1p(exp_of_size(z))).sqrt()


def scores_of(z: Tensor, score: str) -> Tensor:
    """Return the scores of all experts, by which they are chosen, (..., E). By "topk_softmax" these are the logits."""
    if score == "softmax":
        return torch.softmax(z, -1)
    if score == "sigmoid":
        return sigmoid(z)
    return sqrt_softplus(z) if score == "sqrt_softplus" else z


def choices_of(z: Tensor, score: str, bias: Tensor | None) -> Tensor:
    """Return the numbers by which experts are chosen: score + bias, (..., E)."""
    scores = scores_of(z, score)
    return scores if bias is None else scores + bias.to(scores.dtype)


def largest(values: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest of each row, (..., k), in falling order; ties to the lowest index.

    NaN is larger than any number.
    """
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :k]


def grouped(choices: Tensor, groups: int) -> Tensor:
    """Return the choices of each group, (..., groups, E / groups)."""
    return choices.reshape(*choices.shape[:-1], groups, choices.shape[-1] // groups)


def group_scores_of(choices: Tensor, group_score: str) -> Tensor:
    """Return the score of each group of (..., groups, E / groups): (..., groups)."""
    if group_score == "max":
        return choices.amax(-1)  # NaN where there is one
    best = choices.topk(2, -1).values  # NaN first
    return best[..., 0] + best[..., 1]


def chosen_of(
    choices: Tensor,
    k: int,
    groups: int,
    top_groups: int,
    group_score: str,
    largest: Callable[[Tensor, int], Tensor] = largest,
) -> Tensor:
    """Return the experts of each row, (..., k) int64. ``largest`` may be a faster one."""
    if groups in (1, top_groups):
        return largest(choices, k)
    of_groups = grouped(choices, groups)
    width = of_groups.shape[-1]
    # in the order of their indices, so that ties among their experts go to the lowest index
    best = largest(group_scores_of(of_groups, group_score), top_groups).sort(-1).values
    members = of_groups.gather(-2, best[..., None].expand(*best.shape, width))
    member = largest(members.flatten(-2), k)
    group = torch.div(member, width, rounding_mode="floor")
    return member + (best.gather(-1, group) - group) * width


def known_of(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the chosen experts as int64, 0 for a number outside [0, E), and True for rows with one, (..., 1)."""
    index = chosen.long()
    wrong = (index < 0) | (index >= experts)
    return index.masked_fill(wrong, 0), wrong.any(-1, keepdim=True)


def weights_of(
    z: Tensor, scores: Tensor, chosen: Tensor, score: str, normalize: bool, eps: float, scale: float
) -> Tensor:
    """Return the weights of the chosen, (..., k); NaN in a row in which one is no expert."""
    index, wrong = known_of(chosen, z.shape[-1])
    picked = torch.softmax(z.gather(-1, index), -1) if score == "topk_softmax" else scores.gather(-1, index)
    if normalize:
        picked = picked / (picked.sum(-1, keepdim=True) + eps)
    return (picked * scale).masked_fill(wrong, float("nan"))


def picked_gradient(grad: Tensor, picked: Tensor, normalize: bool, eps: float, scale: float) -> Tensor:
    """Return the gradient of the scores of the chosen, (..., k), from that of the weights."""
    scaled = grad * scale
    if not normalize:
        return scaled
    total = picked.sum(-1, keepdim=True) + eps
    return (scaled - (scaled * (picked / total)).sum(-1, keepdim=True)) / total


def softmax_gradient(grad: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the argument of a softmax from that of its result y."""
    return y * (grad - (grad * y).sum(-1, keepdim=True))


def logits_gradient(
    grad: Tensor, logits: Tensor, chosen: Tensor, score: str, normalize: bool, eps: float, scale: float
) -> Tensor:
    """Return the gradient of the logits, (..., E), in the dtype of the arithmetic; NaN where the weights are."""
    z, g = upcast(logits), upcast(grad)
    index, wrong = known_of(chosen, z.shape[-1])
    at = z.gather(-1, index)
    if score == "softmax":
        scores = torch.softmax(z, -1)
        dpicked = picked_gradient(g, scores.gather(-1, index), normalize, eps, scale)
        dscores = torch.zeros_like(z).scatter_add(-1, index, dpicked)
        return softmax_gradient(dscores, scores).masked_fill(wrong, float("nan"))
    if score == "topk_softmax":
        picked = torch.softmax(at, -1)
        dat = softmax_gradient(picked_gradient(g, picked, normalize, eps, scale), picked)
    elif score == "sigmoid":
        picked = sigmoid(at)
        dat = picked_gradient(g, picked, normalize, eps, scale) * picked * sigmoid(-at)
    else:
        picked = sqrt_softplus(at)
        dat = picked_gradient(g, picked, normalize, eps, scale) * slope_of_sqrt_softplus(at, picked)
    return torch.zeros_like(z).scatter_add(-1, index, dat).masked_fill(wrong, float("nan"))


def slope_of_sqrt_softplus(z: Tensor, y: Tensor) -> Tensor:
    """Return sigmoid(z) / (2 y), and its limit 0 where y is 0."""
    flat = y == 0
    return (sigmoid(z) / (2 * y.masked_fill(flat, 1.0))).masked_fill(flat, 0.0)

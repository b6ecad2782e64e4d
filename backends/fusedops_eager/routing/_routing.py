"""The routing of experts in plain torch, in few passes over the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import upcast
from fusedops.ops.routing import formulas
from fusedops.ops.routing.arguments import TopKRoutingArgs, TopKRoutingGradArgs


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


def top_k_routing_backward(a: TopKRoutingGradArgs) -> Tensor:
    """Compute the gradient from the logits and the chosen experts."""
    gradient = logits_gradient(a.grad_weights, upcast(a.logits), a.chosen, a.score, a.normalize, a.eps, a.scale)
    return gradient.to(a.logits.dtype).contiguous()


def scores_of(z: Tensor, score: str) -> Tensor:
    """Return the scores of all numbers of z. exp has no end that is computed otherwise, as torch.sigmoid has."""
    if score == "sigmoid":
        return z.neg().exp_().add_(1.0).reciprocal_()  # where exp is inf, 0
    return formulas.scores_of(z, score)


def keys_of(values: Tensor) -> Tensor:
    """Return int64 keys of float32 numbers, all different in a row, in the order in which experts are chosen.

    The bits of a float32 are an integer in the order of the numbers, but for the sign. Below it, the lower index is the
    larger number.
    """
    bits = (values + 0.0).view(torch.int32)  # no -0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill(values.isnan(), 0x7FFFFFFF)
    last = values.shape[-1] - 1
    return (ordered.long() << 32) | torch.arange(last, -1, -1, device=values.device)


def largest(values: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest of each row in falling order, see :func:`formulas.largest`."""
    if not values.numel():  # of a row of any length
        return torch.empty((*values.shape[:-1], k), dtype=torch.int64, device=values.device)
    return _largest_on_a_cpu(values, k) if values.is_cpu else _by_keys(values, k)


def _by_keys(values: Tensor, k: int) -> Tensor:
    """Return the same by one topk of numbers that are all different."""
    if values.dtype is not torch.float32:
        return formulas.largest(values, k)
    keys = keys_of(values).topk(k, -1).values
    return values.shape[-1] - 1 - (keys & 0xFFFFFFFF)


def _largest_on_a_cpu(values: Tensor, k: int) -> Tensor:
    """Return the same by torch.topk, and look again at the rows in which it may choose otherwise: those with ties or
    NaN. Other devices would wait for the number of these rows.
    """
    count = min(k + 1, values.shape[-1])
    top, index = values.topk(count, -1)
    falls = top[..., :-1] > top[..., 1:]
    index = index[..., :k]
    unsure = ~falls.all(-1)
    if not unsure.any():
        return index
    # a tie among the chosen is one of their order
    lowest = index[unsure].sort(-1).values
    index[unsure] = lowest.gather(-1, formulas.largest(values[unsure].gather(-1, lowest), k))
    if count > k:
        beyond = ~falls[..., -1]
        index[beyond] = _by_keys(values[beyond], k)
    return index


def weights_of(picked: Tensor, normalize: bool, eps: float, scale: float) -> Tensor:
    """Return the weights of scores (..., k), which may be changed in place."""
    if normalize:
        picked = picked.div_(picked.sum(-1, keepdim=True).add_(eps))
    return picked if scale == 1.0 else picked.mul_(scale)


def logits_gradient(
    grad: Tensor, z: Tensor, chosen: Tensor, score: str, normalize: bool, eps: float, scale: float
) -> Tensor:
    """Return :func:`formulas.logits_gradient` of a z that is float32 or float64."""
    if score != "softmax":
        return formulas.logits_gradient(grad, z, chosen, score, normalize, eps, scale)
    index, wrong = formulas.known_of(chosen, z.shape[-1])
    scores = torch.softmax(z, -1)
    picked = scores.gather(-1, index)
    terms = formulas.picked_gradient(grad.to(z.dtype), picked, normalize, eps, scale) * picked
    result = scores.mul_(-terms.sum(-1, keepdim=True)).scatter_add_(-1, index, terms)
    return result.masked_fill_(wrong, float("nan"))

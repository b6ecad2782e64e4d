"""The routing of experts in plain torch, in few passes over the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.ops.routing import formulas


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

"""The error bounds of a routing, and the choices that a right kernel may make.

A score is off by ``absolute`` times its size, and times the size of the argument of its exponential. Two choices within
that may change their order; but equal logits with equal biases have equal scores, whose order is that of the index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops._contract.evidence import finite_size, tolerances
from fusedops.dtypes import compute_dtype
from fusedops.ops.routing import formulas
from fusedops.ops.routing.arguments import TopKRoutingArgs, TopKRoutingGradArgs

TOLERANCE = tolerances((2e-6, 1e-6), (1e-14, 1e-14))


class Scores(NamedTuple):
    """Scores in float64, and their errors.

    Attributes:
        z: the logits.
        s: the scores.
        error: the largest error of each.
        share: the same as a share of the score, without what underflows.
    """

    z: Tensor
    s: Tensor
    error: Tensor
    share: Tensor

    def at(self, index: Tensor) -> Scores:
        """Return those of some experts."""
        return Scores(*(each.gather(-1, index) for each in self))


def scores_of(absolute: float, logits: Tensor, score: str) -> Scores:
    """Return the scores of all experts."""
    z, s = logits.double(), formulas.scores_of(logits.double(), score)
    info = torch.finfo(compute_dtype(logits.dtype))
    if score == "topk_softmax":
        return Scores(z, s, torch.zeros_like(s), torch.zeros_like(s))
    if score == "softmax":
        argument = finite_size(z - z.amax(-1, keepdim=True)) if z.shape[-1] else z
    else:
        argument = finite_size(z) * formulas.sigmoid(-z).nan_to_num(nan=0.0)  # of exp(-abs(z)) beside 1
    least = 4 * info.tiny
    share = absolute * (1.0 + argument)
    return Scores(z, s, share * finite_size(s) + (math.sqrt(least) if score == "sqrt_softplus" else least), share)


def _softmax_of(absolute: float, z: Tensor, dtype: torch.dtype) -> Scores:
    """Return the scores of the chosen by "topk_softmax"."""
    s = torch.softmax(z, -1)
    share = absolute * (1.0 + finite_size(z - z.amax(-1, keepdim=True)))
    return Scores(z, s, share * finite_size(s) + 4 * torch.finfo(compute_dtype(dtype)).tiny, share)


def _picked(absolute: float, logits: Tensor, index: Tensor, score: str) -> tuple[Scores, Scores]:
    """Return the scores of all experts, and those of the chosen, from which the weights are computed."""
    scores = scores_of(absolute, logits, score)
    chosen = scores.at(index)
    return scores, _softmax_of(absolute, chosen.z, logits.dtype) if score == "topk_softmax" else chosen


def _total_of(picked: Scores, normalize: bool, eps: float) -> tuple[Tensor, Tensor]:
    """Return what the scores are divided by, and its error as a share; inf where it may be 0."""
    if not normalize:
        one = torch.ones_like(picked.s[..., :1])
        return one, torch.zeros_like(one)
    total = picked.s.sum(-1, keepdim=True) + eps
    error = picked.error.sum(-1, keepdim=True)
    return total, torch.where(2 * error < total, error / total, math.inf)


def weights_error_bound(absolute: float, a: TopKRoutingArgs) -> tuple[Tensor]:
    """Return the largest errors of the weights, (..., k), for the choice of float64 or the given one."""
    index = a.index
    if index is None:
        choices = formulas.choices_of(a.logits.double(), a.score, a.bias)
        index = formulas.chosen_of(choices, a.k, a.groups, a.top_groups, a.group_score)
    known, _ = formulas.known_of(index, a.logits.shape[-1])
    _, picked = _picked(absolute, a.logits, known, a.score)
    total, of_total = _total_of(picked, a.normalize, a.eps)
    size = finite_size(picked.s) / total
    error = picked.error / total + size * (of_total + 2 * absolute)
    largest = torch.finfo(compute_dtype(a.logits.dtype)).max / 4
    unknown = (abs(a.scale) * size >= largest) | of_total.isinf()  # also where the scale is 0: 0 / 0 may be NaN
    return ((abs(a.scale) * error).masked_fill(unknown, math.inf),)


def logits_error_bound(absolute: float, a: TopKRoutingGradArgs) -> Tensor:
    """Return the largest errors of the gradient of the logits, (..., E)."""
    absolute = max(absolute, TOLERANCE[compute_dtype(a.logits.dtype)].absolute)
    known, _ = formulas.known_of(a.chosen, a.logits.shape[-1])
    scores, picked = _picked(absolute, a.logits, known, a.score)
    total, of_total = _total_of(picked, a.normalize, a.eps)
    s, g = finite_size(picked.s), finite_size(a.grad_weights) * abs(a.scale) / total
    inner = (g * s / total).sum(-1, keepdim=True) if a.normalize else torch.zeros_like(total)
    size = g + inner  # of the gradient of the scores of the chosen
    shares = picked.share.amax(-1, keepdim=True) if a.k else picked.share
    error = size * (3 * shares + 3 * of_total + 6 * absolute)
    error = error + g * (picked.error / total).sum(-1, keepdim=True) * a.normalize
    if a.score in ("softmax", "topk_softmax"):
        own = scores if a.score == "softmax" else picked
        size, error = (_spread(each, known, own.z) for each in (size, error)) if own is scores else (size, error)
        y = finite_size(own.s) + own.error
        moved = (size * y).sum(-1, keepdim=True)
        of_result = y * (error + (error * y).sum(-1, keepdim=True))
        of_result = of_result + y * (size + moved) * (2 * own.share.nan_to_num(0.0) + 4 * absolute)
        of_result = of_result + own.error * (size + moved) + y * (size * own.error).sum(-1, keepdim=True)
        result = y * (size + moved)
    else:
        other = formulas.sigmoid(-picked.z).nan_to_num(nan=0.0) + absolute
        if a.score == "sigmoid":
            slope = (s + picked.error) * other
            of_slope = picked.error * other + slope * 4 * absolute + absolute * s
        else:
            slope = finite_size(formulas.slope_of_sqrt_softplus(picked.z, picked.s)) + picked.error
            of_slope = slope * (3 * picked.share + 4 * absolute) + 2 * picked.error
        of_result, result = error * slope + size * of_slope, size * slope
    largest = torch.finfo(compute_dtype(a.logits.dtype)).max / 16
    overflows = (result >= largest) | (size >= largest) | of_total.isinf()
    # a product with the scale may come before the division by the total, and reaches the whole row
    overflows = overflows | (finite_size(a.grad_weights) * abs(a.scale) >= largest).any(-1, keepdim=True)
    of_result = of_result.masked_fill(overflows, math.inf)
    if a.score == "softmax":
        return of_result.masked_fill(overflows.any(-1, keepdim=True), math.inf)
    return _spread(of_result.nan_to_num(nan=math.inf, posinf=math.inf), known, scores.z)  # the others are exactly 0


def _spread(values: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Return values of the chosen at their experts, 0 elsewhere; those of an expert that is there twice are added."""
    return torch.zeros_like(like).scatter_add(-1, index, values)


# ------------------------------------------------------------------------------------------------------ right choices


class Compared(NamedTuple):
    """Numbers that a kernel compares, such as the choices of a row or the scores of its groups, (R, N).

    Attributes:
        value: in float64.
        error: by which a kernel's may differ.
        keys: of what each is computed: two with equal keys are equal in every kernel. (R, N, n).
        known: True where the keys decide so.
    """

    value: Tensor
    error: Tensor
    keys: Tensor
    known: Tensor

    def surely_before(self, at: Tensor) -> Tensor:
        """Return True for each number that every kernel has before the number at index ``at`` (R,): (R, N)."""
        one = at[:, None]
        value, error = self.value.gather(1, one), self.error.gather(1, one)
        keys = self.keys.gather(1, one[..., None].expand(-1, -1, self.keys.shape[-1]))
        lower = torch.arange(self.value.shape[1]) < one
        equal = (self.keys == keys) | (self.keys.isnan() & keys.isnan())
        tied = equal.all(-1) & self.known & self.known.gather(1, one)
        tied |= (self.value == value) & (self.error == 0) & (error == 0)
        mine, theirs = self.value.isnan(), value.isnan()
        above = self.value - self.error > value + error
        before = torch.where(mine | theirs, mine & ~theirs, above & ~tied)
        return before | (torch.where(mine & theirs, True, tied & ~(mine ^ theirs)) & lower)


def pin_choice(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the arguments of a call with the index of a kernel given, where a right kernel may choose so.

    Where it may not, the row has the choice of float64: the index is then found to differ.

    Args:
        args: every argument, on the CPU.
        outputs: the outputs of the kernel, on the CPU.
    """
    logits, k, score, bias, groups, top_groups, group_score = args[:7]
    chosen = outputs[1]
    if args[-1] is not None or chosen.shape != (*logits.shape[:-1], k) or not chosen.numel():
        return tuple(args)
    experts = logits.shape[-1]
    choices = formulas.choices_of(logits.double(), score, None if bias is None else bias.double())
    own = formulas.chosen_of(choices, k, groups, top_groups, group_score).reshape(-1, k)
    given = chosen.reshape(-1, k)
    rows = (own != given).any(-1).nonzero()[:, 0]
    if rows.numel():
        compared = _choices(logits.reshape(-1, experts)[rows], score, bias)
        fits = _may_choose(compared, given[rows], groups, top_groups, group_score)
        own[rows[fits]] = given[rows[fits]]
    return (*args[:-1], own.view(chosen.shape))


def _choices(logits: Tensor, score: str, bias: Tensor | None) -> Compared:
    """Return the choices of some rows."""
    dtype = compute_dtype(logits.dtype)
    info = torch.finfo(dtype)
    scores = scores_of(TOLERANCE[dtype].absolute, logits, score)
    value, error, keys = scores.s, scores.error, logits.double()[..., None]
    if bias is not None:
        wide = bias.double().expand(value.shape)
        value = value + wide
        error = error + info.eps * (value.abs() + wide.abs())
        keys = torch.cat((keys, wide[..., None]), -1)
    error = torch.where(value.isfinite(), error.masked_fill(value.abs() > info.max / 4, math.inf), 0.0)
    return Compared(value, error, keys, torch.ones_like(value, dtype=torch.bool))


def _may_choose(choices: Compared, chosen: Tensor, groups: int, top_groups: int, group_score: str) -> Tensor:
    """Return True for each row whose chosen experts (R, k) a right kernel may choose, in this order."""
    experts = choices.value.shape[1]
    fits = ((chosen >= 0) & (chosen < experts)).all(-1)
    chosen = chosen.clamp(0, experts - 1)
    allowed = torch.ones_like(choices.known)
    if 1 < groups != top_groups:
        width = experts // groups
        best, in_time = _may_be_best(_groups(choices, groups, group_score), chosen // width, top_groups)
        fits &= in_time
        allowed = best.repeat_interleave(width, 1)
    for rank in range(chosen.shape[1]):
        at = chosen[:, rank]
        # also False for an expert that is there already
        fits &= allowed.gather(1, at[:, None])[:, 0] & ~(choices.surely_before(at) & allowed).any(-1)
        allowed = allowed.scatter(1, at[:, None], False)
    return fits


def _groups(choices: Compared, groups: int, group_score: str) -> Compared:
    """Return the scores of the groups."""
    count = 2 if group_score == "top2" else 1
    rows, width = choices.value.shape[0], choices.value.shape[1] // groups
    value = choices.value.view(rows, groups, width)
    order = torch.sort(value, dim=-1, descending=True, stable=True).indices
    value = value.gather(-1, order)
    error = choices.error.view(rows, groups, width).gather(-1, order)
    keys = choices.keys.view(rows, groups, width, -1)
    keys = keys.gather(2, order[..., None].expand(keys.shape))
    known = torch.ones(rows, groups, dtype=torch.bool)
    if width > count:  # the next one may not be one of the best
        last, after = keys[:, :, count - 1], keys[:, :, count]
        same = ((last == after) | (last.isnan() & after.isnan())).all(-1)
        known = same | (value[..., count] + error[..., count] < value[..., count - 1] - error[..., count - 1])
    total = value[..., :count].sum(-1)
    sum_error = error[..., :count].sum(-1) + torch.where(total.isfinite(), (count - 1) * 1.2e-7 * total.abs(), 0.0)
    sum_error = torch.where(known | (count == 1), sum_error, error[..., : count + 1].sum(-1) + sum_error)
    return Compared(total, sum_error.nan_to_num(nan=0.0), keys[:, :, :count].flatten(2), known)


def _may_be_best(groups: Compared, used: Tensor, top_groups: int) -> tuple[Tensor, Tensor]:
    """Return the groups that experts are chosen from where these (R, k) are used, and True where they may be.

    The groups are those that every kernel has among the best, and the used ones.
    """
    rows, count = groups.value.shape
    before = torch.stack([groups.surely_before(torch.full((rows,), each)) for each in range(count)], 1)
    late = before.sum(-1) >= top_groups  # at least top_groups groups rank before it
    others = count - 1 - before.sum(1)  # those that may be before it
    is_used = torch.zeros_like(late).scatter(1, used, True)
    best = is_used | (others < top_groups)
    return best, ~(is_used & late).any(-1) & (best.sum(-1) <= top_groups)

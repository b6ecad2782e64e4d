"""The arguments of :func:`fusedops.top_k_routing` with which it chooses and weighs experts as a router does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fusedops.integrations.transformers._routers.small_router import Choices, Path
from fusedops.ops.routing import formulas

_TOLERANCE = 1e-5
_LARGEST_EPS = 1e-3
_CHOICE = "its choice of experts is none of top_k_routing"
_WEIGHTS = "its weights are none of top_k_routing"


@dataclass(frozen=True)
class Routing:
    """The arguments of the op.

    ``bias`` is the path of the tensor that takes part in the choice, () where it is an argument of the router, or None.
    """

    k: int
    score: Any
    bias: Path | None = None
    groups: int = 1
    top_groups: int = 1
    group_score: Any = "top2"
    normalize: bool = False
    eps: float = 0.0
    scale: float = 1.0


def recognised_routing(choices: Choices, settings: list[float]) -> Routing | str:
    """Return the arguments, or the reason why there are none.

    Args:
        choices: of the router, with its logits.
        settings: numbers that it may have as an argument.
    """
    k, experts = choices.result.chosen.shape[-1], choices.logits.shape[-1]
    sizes = [int(each) for each in settings if type(each) is int]
    reason = _CHOICE
    for groups in _groups(k, experts, sizes):
        for bias, score in product((None, *choices.vectors), formulas.SCORES):
            found = Routing(k, score, bias, *groups)
            if not _chooses(choices, found):
                continue
            weighed = _weighed(choices, found, settings)
            if isinstance(weighed, str):
                reason = weighed if reason in (_CHOICE, _WEIGHTS) else reason
            elif _chooses_by_logits(choices, found):
                reason = f"it chooses by its logits, also where their {score} is equal"
            else:
                return weighed
    return reason


def _groups(k: int, experts: int, sizes: list[int]) -> Iterator[tuple[int, int, str]]:
    """Yield the numbers of groups, of the best of them, and their score."""
    yield 1, 1, "top2"
    for groups, best, score in product(sizes, sizes, formulas.GROUP_SCORES):
        if groups > 1 and 0 < best < groups and experts % groups == 0:
            width = experts // groups
            if width >= (2 if score == "top2" else 1) and k <= width * best:
                yield groups, best, score


def _chooses(choices: Choices, found: Routing) -> bool:
    """Return True where the choice is the op's, but for scores that are nearly equal."""
    settled, chosen = _settled(choices, found)
    same = (choices.result.chosen.sort(-1).values == chosen).all(-1)
    return bool(same[settled].all()) and bool(settled[choices.ordinary].float().mean() >= 0.5)


def _chooses_by_logits(choices: Choices, found: Routing) -> bool:
    """Return True where equal scores, as those of a sigmoid of 40, are no tie for the router."""
    settled, _ = _settled(choices, found)
    if found.bias is not None or found.groups > 1 or settled.all():
        return False
    by_logits = formulas.largest(choices.logits, found.k).sort(-1).values
    return bool((choices.result.chosen.sort(-1).values == by_logits)[~settled].all())


def _settled(choices: Choices, found: Routing) -> tuple[Tensor, Tensor]:
    """Return True for each row whose choice is no matter of rounding, (N,), and the op's choice in ascending order."""
    z = choices.logits
    bias = None if found.bias is None else choices.vectors[found.bias]
    scores = formulas.choices_of(z, found.score, bias).double()
    chosen = _sets(scores, found)
    settled = torch.ones(len(z), dtype=torch.bool, device=z.device)
    for noise in _noises(z):
        settled &= (_sets(scores * (1 + 1e-5 * noise) + 1e-300 * noise, found) == chosen).all(-1)
    return settled, chosen


def _noises(z: Tensor) -> Iterator[Tensor]:
    """Yield factors by which a choice between nearly equal scores changes; equal ones change by the first two."""
    rising = torch.linspace(-1, 1, z.shape[-1], dtype=torch.float64, device=z.device).expand(z.shape)
    yield rising
    yield -rising
    for seed in range(3):
        generator = torch.Generator("cpu").manual_seed(seed)
        yield torch.randn(z.shape, generator=generator, dtype=torch.float64, device="cpu")


def _sets(scores: Tensor, found: Routing) -> Tensor:
    chosen = formulas.chosen_of(scores, found.k, found.groups, found.top_groups, found.group_score)
    return chosen.sort(-1).values


def _weighed(choices: Choices, found: Routing, settings: list[float]) -> Routing | str:
    """Return the arguments with normalize, eps and scale, or the reason why there are none."""
    z, own = choices.logits, choices.result
    at = z.gather(-1, own.chosen)
    is_softmax = found.score == "topk_softmax"
    scores = torch.softmax(at, -1) if is_softmax else formulas.scores_of(z, found.score).gather(-1, own.chosen)
    scales = [1.0, 1 / found.k, *(float(each) for each in settings if each)]
    epses = [0.0, *(float(each) for each in settings if 0 < each <= _LARGEST_EPS)]
    reason = _WEIGHTS
    for normalize, scale in product((False, True), dict.fromkeys(scales)):
        for eps in dict.fromkeys(epses) if normalize else (0.0,):
            weights = (scores / (scores.sum(-1, keepdim=True) + eps) if normalize else scores) * scale
            agrees = _near_rows(own.weights, weights)
            if agrees.all():
                return replace(found, normalize=normalize, eps=eps, scale=scale)
            if agrees[choices.ordinary].all():
                reason = "its weights differ from those of top_k_routing where the scores are small"
    return reason


def _near_rows(weights: Tensor, expected: Tensor) -> Tensor:
    """Return True for each row whose numbers are near."""
    wide = expected.double()
    size = wide.abs() + wide.abs().mean(-1, keepdim=True)
    near = (weights.double() - wide).abs() <= _TOLERANCE * size
    return (near | (weights.isnan() & wide.isnan())).all(-1)

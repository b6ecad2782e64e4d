"""Wrong kernels of top_k_routing, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from wrong_kernels import Run, wrong

from fusedops.dtypes import upcast
from fusedops.ops.routing import formulas

ROUTING = "top_k_routing"


def choices(a: SimpleNamespace) -> Tensor:
    """Return the numbers by which experts are chosen."""
    return formulas.choices_of(upcast(a.logits), a.score, a.bias)


def chosen(a: SimpleNamespace, values: Tensor, **changes: Any) -> Tensor:
    """Return the choice by other numbers; the given one where there is one."""
    options = {key: changes.get(key, getattr(a, key)) for key in ("k", "groups", "top_groups", "group_score")}
    return formulas.chosen_of(values, **options) if a.index is None else a.index


@wrong("a tie goes to the highest index", ROUTING, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    flipped = a.logits.shape[-1] - 1 - chosen(a, choices(a).flip(-1))
    return run(index=flipped if a.index is None else a.index)


@wrong("two equal scores at the top are in falling order of their index", ROUTING, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    values, index = choices(a), chosen(a, choices(a))
    picked = values.gather(-1, index) if a.index is None else None
    if picked is None or a.k < 2:
        return run()
    tied = (picked[..., 0] == picked[..., 1])[..., None]
    first = torch.where(tied, index[..., [1, 0]], index[..., :2])
    return run(index=torch.cat((first, index[..., 2:]), -1))


@wrong("a tie of groups goes to the last group", ROUTING, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.groups in (1, a.top_groups) or a.index is not None:
        return run()
    grouped = formulas.grouped(choices(a), a.groups)
    scores = formulas.group_scores_of(grouped, a.group_score)
    best = a.groups - 1 - formulas.largest(scores.flip(-1), a.top_groups)
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    lowest = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    return run(index=formulas.largest(lowest, a.k))


@wrong("NaN is smaller than any number", ROUTING, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(index=chosen(a, choices(a).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)))


@wrong("scores are compared in bfloat16", ROUTING, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(index=chosen(a, choices(a).bfloat16().double()))


@wrong("the bias is not in the choice", ROUTING, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(bias=None)


@wrong("the bias is in the weights", ROUTING, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    index = chosen(a, choices(a))
    if a.bias is None or a.score == "topk_softmax":
        return run()
    values = choices(a).gather(-1, index.long())
    if a.normalize:
        values = values / (values.sum(-1, keepdim=True) + a.eps)
    return values * a.scale, index.long().clone()


@wrong("a group's score is always that of its best expert", ROUTING, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(group_score="max")


@wrong("a group's score is always that of its two best experts", ROUTING, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(group_score="top2")


@wrong("experts of other groups count as 0", ROUTING, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.groups in (1, a.top_groups) or a.index is not None:
        return run()
    grouped = formulas.grouped(choices(a), a.groups)
    best = formulas.largest(formulas.group_scores_of(grouped, a.group_score), a.top_groups)
    kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
    return run(index=formulas.largest(grouped.masked_fill(~kept[..., None], 0.0).flatten(-2), a.k))


@wrong("the chosen are in the order of their index", ROUTING, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(index=chosen(a, choices(a)).sort(-1).values)


@wrong("the last of the chosen is the next best", ROUTING, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.index is not None or a.groups > 1 or a.k == a.logits.shape[-1]:
        return run()
    more = formulas.largest(choices(a), a.k + 1)
    return run(index=torch.cat((more[..., :-2], more[..., -1:]), -1))


@wrong("a given index is not used", ROUTING, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(index=None)


@wrong("eps is not in the sum", ROUTING, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(eps=0.0)


@wrong("the scores are scaled before they are normalized", ROUTING, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(scale=1.0) if a.normalize else run()


@wrong("the softmax of the k largest is one over all", ROUTING, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(index=chosen(a, choices(a)), score="softmax") if a.score == "topk_softmax" else run()


@wrong("the gradient lacks that of the sum", ROUTING, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if not a.normalize or a.score == "topk_softmax":
        return run()
    scores = formulas.scores_of(upcast(a.logits), a.score).gather(-1, a.chosen)
    return run(normalize=False, grad_weights=a.grad_weights / (scores.sum(-1, keepdim=True) + a.eps))


@wrong("experts that are not chosen have no gradient", ROUTING, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    there = torch.zeros(a.logits.shape, dtype=torch.bool).scatter(-1, a.chosen, True)
    return run().masked_fill(~there, 0.0)


@wrong("an expert that is there twice has the gradient of one", ROUTING, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    again = (a.chosen[..., :, None] == a.chosen[..., None, :]).tril(-1).any(-1)
    return run(grad_weights=a.grad_weights.masked_fill(again, 0.0))


@wrong("the gradient is not scaled", ROUTING, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(scale=1.0)


@wrong("the gradient lacks eps", ROUTING, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(eps=0.0)

"""linear_cross_entropy on DTensors whose rows or classes are sharded: what the ranks send each other. Nothing is
gathered.

Of sharded rows, the sum of the losses and the number of targets that count; the gradients of weight and bias are the
sums over a rank's rows. Of sharded classes, which are the first dims of weight and bias, what cross entropy sends of
each chunk of rows (``sharding.py``); the gradient of x is the sum over a rank's classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.values import Combined, Ranks, Sharding
from fusedops.ops.losses import formulas
from fusedops.ops.losses import linear_formulas as linear
from fusedops.ops.losses import sharding as of_logits
from fusedops.ops.losses.arguments import check_targets

_LEAST_ROWS = 256  # of a chunk: each reads the whole weight


def forward(given: Mapping[str, Any], ranks: Ranks) -> tuple[Tensor, ...]:
    """Compute this rank's part of the loss and, where the call keeps them, of the gradients."""
    target, ignore_index, summed = given["target"], given["ignore_index"], of_logits.reduces(given)
    if ranks.is_cut(-1):
        check_targets("linear_cross_entropy", target, ignore_index, ranks.shard.whole[-1])
        ones = torch.ones_like(target, dtype=linear.arithmetic(given["x"], given["weight"]))
        scale = formulas.row_scales(ones, target, ignore_index, ranks.shard.whole[-1], "sum", None)
        loss, dx, *sums = _of_classes(given, ranks, scale if ranks.saves else None)
        saved = [dx, *(each if summed else each.new_empty(0) for each in sums)] if ranks.saves else []
    else:
        loss, *saved = ranks.run(reduction="sum", denominator=None)
    if summed:
        loss = ranks.total(loss.sum(), of_logits.dims_of_rows(ranks), "sum")
        if given["reduction"] == "mean":
            loss = loss / of_logits.divisor(given, ranks, loss.dtype)
    return loss, *saved


def backward(given: Mapping[str, Any], ranks: Ranks) -> tuple[Tensor | None, ...]:
    """Compute this rank's part of the gradients of x, weight and bias."""
    grad, names = given["grad"], ("x", "weight", "bias")
    if given["reduction"] == "mean":
        grad = grad / of_logits.divisor(given, ranks, grad.dtype)
    if not ranks.is_cut(-1):
        return ranks.run(grad=grad, reduction="sum", denominator=None)
    if of_logits.reduces(given):
        each = [given[f"{name}_grad"] * grad for name in names]
    else:
        scale = formulas.row_scales(grad, given["target"], given["ignore_index"], ranks.shard.whole[-1], "sum", None)
        _, *each = _of_classes(given, ranks, scale)
    wanted = zip(names, each, given["needs"])
    return tuple(result.to(given[name].dtype) if needed else None for name, result, needed in wanted)


def _of_classes(given: Mapping[str, Any], ranks: Ranks, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the losses of the rows and, where each rank has some of the classes, its parts of the gradients.

    Those of x, weight and bias of the sum of ``scale * loss``; empty where scale is None, or without a bias.
    """
    x, weight, bias, target = given["x"], given["weight"], given["bias"], given["target"].flatten()
    rows, wide = x.reshape(target.numel(), x.shape[-1]), linear.arithmetic(x, weight)
    ignore_index, nothing = given["ignore_index"], x.new_empty(0, dtype=wide)
    # the same on every rank that has other classes of these rows
    size = given["chunk"] or max(_LEAST_ROWS, rows.numel() // max(ranks.shard.whole[-1], 1))
    losses: list[Tensor] = []
    of_x: list[Tensor] = []
    of_weight, of_bias = (
        torch.zeros_like(weight, dtype=wide),
        nothing if bias is None else bias.new_zeros(1, dtype=wide),
    )
    for start in range(0, max(target.numel(), 1), size):
        some, own = rows[start : start + size], target[start : start + size]
        logits = linear.capped_logits(some, weight, own, bias, ignore_index, None)
        part = {**given, "logits": logits, "target": own}
        loss, lse = of_logits.losses_of_classes(part, ranks)
        losses.append(loss)
        if scale is not None:
            dz = of_logits.gradient_of_classes(part, ranks, lse, scale.flatten()[start : start + size])
            of_x.append(linear.product(dz, weight.to(wide)).to(x.dtype))
            of_weight = of_weight + linear.weight_sums(dz, some, own, ignore_index)
            of_bias = of_bias if bias is None else of_bias + dz.sum(0)
    dx = nothing if scale is None else torch.cat(of_x).view(x.shape)
    return torch.cat(losses).view(given["target"].shape), dx, of_weight, of_bias


def shape_of(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of the logits."""
    return (*given["x"].shape[:-1], given["weight"].shape[0])


def dims_of(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dims of the logits that those of the tensors go with. Every rank needs the last ones of x whole."""
    rows = tuple(range(-given["x"].dim(), -1))
    return {"x": (*rows, None), "weight": (-1, None), "bias": (-1,), "target": rows}


SHARDING = Sharding(
    whole=(-1,),
    dims_of=dims_of,
    shape_of=shape_of,
    replicated=("denominator",),
    combined=Combined((-1,), of_logits.reduces, forward, backward),
    reason="its classes are cut, and a kernel needs all of them",
)

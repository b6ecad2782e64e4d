"""Cross entropy on DTensors whose rows or classes are sharded: what the ranks send each other. No logits are gathered.

Of sharded rows, the sum of the losses and the number of targets that count. Of sharded classes, for each row the
maximum, then the sum of the exponentials, the logit of the target and the sum of the logits: two all-reduces. Backward
sends nothing but that number of targets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.values import Combined, Ranks, Sharding
from fusedops.ops.losses import formulas
from fusedops.ops.losses.arguments import check_targets


def reduces(given: Mapping[str, Any]) -> bool:
    """Return True where the loss is a sum over the rows of all ranks."""
    return given["reduction"] != "none"


def divisor(given: Mapping[str, Any], ranks: Ranks, dtype: torch.dtype) -> Tensor:
    """Return what "mean" divides by, of the rows of all ranks."""
    if given["denominator"] is not None:
        return given["denominator"].to(dtype).reshape(())
    count = (given["target"] != given["ignore_index"]).sum()
    return ranks.total(count, dims_of_rows(ranks), "sum").clamp(min=1).to(dtype)


def dims_of_rows(ranks: Ranks) -> tuple[int, ...]:
    """Return the dims of the rows."""
    return tuple(range(len(ranks.shard.whole) - 1))


def forward(given: Mapping[str, Any], ranks: Ranks) -> tuple[Tensor, ...]:
    """Compute this rank's part of the loss and, where the call keeps it, of lse."""
    if ranks.is_cut(-1):
        check_targets("cross_entropy", given["target"], given["ignore_index"], ranks.shard.whole[-1])
        loss, *saved = losses_of_classes(given, ranks)
        saved = saved if ranks.saves else []
    else:
        loss, *saved = ranks.run(reduction="none", denominator=None)
    if given["reduction"] != "none":
        loss = ranks.total(loss.sum(), dims_of_rows(ranks), "sum")
        if given["reduction"] == "mean":
            loss = loss / divisor(given, ranks, loss.dtype)
    return loss, *saved


def losses_of_classes(given: Mapping[str, Any], ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and lse, where each rank has some of the classes."""
    target, ignore_index, smoothing = given["target"], given["ignore_index"], given["label_smoothing"]
    classes = ranks.shard.whole[-1]
    _, ignored, wrong = formulas.places(target, ignore_index, classes)
    z = formulas.capped(given["logits"], given["softcap"]).masked_fill(ignored.unsqueeze(-1), 0.0)
    top = z.amax(-1) if z.shape[-1] else z.new_full(z.shape[:-1], -math.inf)  # a rank may have no class
    top = ranks.total(top, (-1,), "max")
    here, own = _own_class(target, ranks, z.shape[-1])
    wanted = z.gather(-1, own.unsqueeze(-1))[..., 0] if z.shape[-1] else z.new_zeros(z.shape[:-1])
    shift = top.masked_fill(top == -math.inf, 0.0)
    sums = [torch.exp(z - shift.unsqueeze(-1)).sum(-1), wanted.masked_fill(~here, 0.0), z.sum(-1)]
    total, picked, of_logits = ranks.total(torch.stack(sums if smoothing != 0 else [*sums[:2], sums[1]]), (-1,), "sum")
    rest = total.log()
    loss, lse = (top - picked) + rest, top + rest
    if smoothing != 0:
        loss = (1 - smoothing) * loss + smoothing * ((top - of_logits / classes) + rest)
    if given["z_loss"] != 0:
        loss = loss + given["z_loss"] * lse.square()
    return loss.masked_fill(ignored, 0.0).masked_fill(wrong, math.nan), lse.masked_fill(ignored, 0.0)


def _own_class(target: Tensor, ranks: Ranks, size: int) -> tuple[Tensor, Tensor]:
    """Return True for each row whose target this rank has, and the place of it, 0 where it has not."""
    own = target - ranks.shard.start[-1]
    here = (own >= 0) & (own < size)
    return here, own.masked_fill(~here, 0)


def backward(given: Mapping[str, Any], ranks: Ranks) -> Tensor:
    """Compute this rank's part of the gradient of the logits."""
    target, ignore_index, classes = given["target"], given["ignore_index"], ranks.shard.whole[-1]
    grad = given["grad"]
    if given["reduction"] == "mean":
        grad = grad / divisor(given, ranks, grad.dtype)
    scale = formulas.row_scales(grad, target, ignore_index, classes, "sum", None)
    if not ranks.is_cut(-1):
        return ranks.run(grad=scale.contiguous(), reduction="none", denominator=None)[0]
    return gradient_of_classes(given, ranks, given["lse"], scale)


def gradient_of_classes(given: Mapping[str, Any], ranks: Ranks, lse: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of this rank's logits of the sum of ``scale * loss``, where each has some of the classes."""
    logits, smoothing, classes = given["logits"], given["label_smoothing"], ranks.shard.whole[-1]
    target, ignore_index = given["target"], given["ignore_index"]
    z = formulas.capped(logits, given["softcap"])
    ignored = (target == ignore_index).unsqueeze(-1)
    here, own = _own_class(target, ranks, z.shape[-1])
    dz = torch.exp(z.masked_fill(ignored, 0.0) - lse.unsqueeze(-1))
    dz = dz * (scale * (1 + 2 * given["z_loss"] * lse)).unsqueeze(-1) - (scale * (smoothing / classes)).unsqueeze(-1)
    if z.shape[-1]:
        hit = (scale * (1 - smoothing)).masked_fill(~here, 0.0).unsqueeze(-1)
        dz = dz.scatter_add(-1, own.unsqueeze(-1), -hit)
    return formulas.uncapped(dz.masked_fill(ignored, 0.0), z, given["softcap"]).to(logits.dtype)


def dims_of(given: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Return the dims of the logits that those of target go with."""
    return {"target": tuple(range(-given["logits"].dim(), -1))}


SHARDING = Sharding(
    whole=(-1,),
    dims_of=dims_of,
    replicated=("denominator",),
    combined=Combined((-1,), reduces, forward, backward),
    reason="its rows are cut, and a kernel needs whole ones",
)

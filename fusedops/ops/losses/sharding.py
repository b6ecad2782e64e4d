"""The losses on DTensors whose rows or classes are sharded: what the ranks send each other. Nothing is gathered.

Sharded rows: the sum of the losses and the number of targets that count. The gradients of weight and bias are the sums
over a rank's rows. Sharded classes, which are the first dims of weight and bias: for each row the maximum, then the sum
of the exponentials, the logit of the target and the sum of the logits, two all-reduces; linear_cross_entropy sends them
for each chunk of rows, and its gradient of x is the sum over a rank's classes. Backward sends nothing but the number of
targets. linear_log_probs sends the same, with a sum for the entropy instead of the logits'.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.values import Combined, Ranks, Sharding
from fusedops.dtypes import compute_dtype, promoted
from fusedops.ops.losses import formulas
from fusedops.ops.losses.arguments import check_targets
from fusedops.ops.losses.formulas import LossOptions

_LEAST_ROWS = 256  # of a chunk: each reads the whole weight


def _reduces(given: Mapping[str, Any]) -> bool:
    """Return True if the loss is a sum over the rows of all ranks."""
    return given["reduction"] != "none"


def _divisor(given: Mapping[str, Any], ranks: Ranks, dtype: torch.dtype) -> Tensor:
    """Return what "mean" divides by, of the rows of all ranks."""
    if given["denominator"] is not None:
        return given["denominator"].to(dtype).reshape(())
    count = (given["target"] != given["ignore_index"]).sum()
    return ranks.total(count, _dims_of_rows(ranks), "sum").clamp(min=1).to(dtype)


def _options(given: Mapping[str, Any]) -> LossOptions:
    """Return the options among the arguments."""
    return LossOptions(*(given[name] for name in LossOptions._fields))


def _dims_of_rows(ranks: Ranks) -> tuple[int, ...]:
    """Return the dims of the rows."""
    return tuple(range(len(ranks.shard.whole) - 1))


def _forward(given: Mapping[str, Any], ranks: Ranks) -> tuple[Tensor, ...]:
    """Compute this rank's part of the loss and, if the call saves it, of lse."""
    if ranks.is_cut(-1):
        check_targets("cross_entropy", given["target"], given["ignore_index"], ranks.shard.whole[-1])
        loss, *saved = _losses_of_classes(given, ranks)
        saved = saved if ranks.saves else []
    else:
        loss, *saved = ranks.run(reduction="none", denominator=None)
    if given["reduction"] != "none":
        loss = ranks.total(loss.sum(), _dims_of_rows(ranks), "sum")
        if given["reduction"] == "mean":
            loss = loss / _divisor(given, ranks, loss.dtype)
    return loss, *saved


def _losses_of_classes(given: Mapping[str, Any], ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return the loss and lse of each row, for sharded classes."""
    target, ignore_index, smoothing = given["target"], given["ignore_index"], given["label_smoothing"]
    classes = ranks.shard.whole[-1]
    _, ignored, wrong = formulas.classes_of(target, ignore_index, classes)
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
    """Return True for each row whose target is one of this rank's classes, and its index among them, else 0."""
    own = target - ranks.shard.start[-1]
    here = (own >= 0) & (own < size)
    return here, own.masked_fill(~here, 0)


def _backward(given: Mapping[str, Any], ranks: Ranks) -> Tensor:
    """Compute this rank's part of the gradient of the logits."""
    target, grad, classes = given["target"], given["grad"], ranks.shard.whole[-1]
    if given["reduction"] == "mean":
        grad = grad / _divisor(given, ranks, grad.dtype)
    scale = formulas.row_scales(grad, target, classes, _options(given).of_sum)
    if not ranks.is_cut(-1):
        return ranks.run(grad=scale.contiguous(), reduction="none", denominator=None)[0]
    return _gradient_of_classes(given, ranks, given["lse"], scale)


def _gradient_of_classes(given: Mapping[str, Any], ranks: Ranks, lse: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of the sum of ``scale * loss`` with respect to this rank's logits, for sharded classes."""
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


def _dims_of(given: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Return the dims of the logits that the dims of target correspond to."""
    return {"target": tuple(range(-given["logits"].dim(), -1))}


CROSS_ENTROPY = Sharding(
    whole=(-1,),
    dims_of=_dims_of,
    replicated=("denominator",),
    combined=Combined((-1,), _reduces, _forward, _backward),
    reason="its rows are cut, and a kernel needs whole ones",
)


# ------------------------------------------------------------------------------------------------ linear_cross_entropy


def _linear_forward(given: Mapping[str, Any], ranks: Ranks) -> tuple[Tensor, ...]:
    """Compute this rank's part of the loss and, if the call saves them, of the gradients."""
    target, ignore_index, summed = given["target"], given["ignore_index"], _reduces(given)
    if ranks.is_cut(-1):
        check_targets("linear_cross_entropy", target, ignore_index, ranks.shard.whole[-1])
        ones = torch.ones_like(target, dtype=compute_dtype(promoted(given["x"], given["weight"])))
        scale = formulas.row_scales(ones, target, ranks.shard.whole[-1], _options(given).of_sum)
        loss, dx, *sums = _linear_of_classes(given, ranks, scale if ranks.saves else None)
        saved = [dx, *(each if summed else each.new_empty(0) for each in sums)] if ranks.saves else []
    else:
        loss, *saved = ranks.run(reduction="sum", denominator=None)
    if summed:
        loss = ranks.total(loss.sum(), _dims_of_rows(ranks), "sum")
        if given["reduction"] == "mean":
            loss = loss / _divisor(given, ranks, loss.dtype)
    return loss, *saved


def _linear_backward(given: Mapping[str, Any], ranks: Ranks) -> tuple[Tensor | None, ...]:
    """Compute this rank's part of the gradients of x, weight and bias."""
    grad, names = given["grad"], ("x", "weight", "bias")
    if given["reduction"] == "mean":
        grad = grad / _divisor(given, ranks, grad.dtype)
    if not ranks.is_cut(-1):
        return ranks.run(grad=grad, reduction="sum", denominator=None)
    if _reduces(given):
        each = [given[f"{name}_grad"] * grad for name in names]
    else:
        scale = formulas.row_scales(grad, given["target"], ranks.shard.whole[-1], _options(given).of_sum)
        _, *each = _linear_of_classes(given, ranks, scale)
    wanted = zip(names, each, given["needs"])
    return tuple(result.to(given[name].dtype) if needed else None for name, result, needed in wanted)


def _linear_of_classes(
    given: Mapping[str, Any], ranks: Ranks, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the losses of the rows and this rank's parts of the gradients of x, weight and bias, for sharded classes.

    The gradients are of the sum of ``scale * loss``: empty if scale is None, and of bias without a bias.
    """
    x, weight, bias, target = given["x"], given["weight"], given["bias"], given["target"].flatten()
    rows, wide = x.reshape(target.numel(), x.shape[-1]), compute_dtype(promoted(x, weight))
    ignore_index, nothing = given["ignore_index"], x.new_empty(0, dtype=wide)
    options = _options(given)._replace(softcap=None)  # applied by what follows
    size = given["chunk"] or _rows_of_chunk(x, ranks)
    losses: list[Tensor] = []
    of_x: list[Tensor] = []
    of_weight = torch.zeros_like(weight, dtype=wide)
    of_bias = nothing if bias is None else bias.new_zeros(1, dtype=wide)
    for start in range(0, max(target.numel(), 1), size):
        some, own = rows[start : start + size], target[start : start + size]
        logits = formulas.linear_logits(some, weight, own, bias, options)
        part = {**given, "logits": logits, "target": own}
        loss, lse = _losses_of_classes(part, ranks)
        losses.append(loss)
        if scale is not None:
            dz = _gradient_of_classes(part, ranks, lse, scale.flatten()[start : start + size])
            of_x.append(formulas.product(dz, weight.to(wide)).to(x.dtype))
            of_weight = of_weight + formulas.weight_sums(dz, some, own, ignore_index)
            of_bias = of_bias if bias is None else of_bias + dz.sum(0)
    dx = nothing if scale is None else torch.cat(of_x).view(x.shape)
    return torch.cat(losses).view(given["target"].shape), dx, of_weight, of_bias


def _rows_of_chunk(x: Tensor, ranks: Ranks) -> int:
    """Return the rows of a chunk: the same on every rank that has other classes of these rows."""
    rows = math.prod(x.shape[:-1])
    return formulas.rows_of_chunk(rows, x.shape[-1], ranks.shard.whole[-1], _LEAST_ROWS)


def _shape_of_logits(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of the logits."""
    return (*given["x"].shape[:-1], given["weight"].shape[0])


def _dims_of_logits(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dims of the logits that each tensor's dims correspond to; None for H, which each rank needs whole."""
    rows = tuple(range(-given["x"].dim(), -1))
    return {"x": (*rows, None), "weight": (-1, None), "bias": (-1,), "target": rows}


LINEAR_CROSS_ENTROPY = Sharding(
    whole=(-1,),
    dims_of=_dims_of_logits,
    shape_of=_shape_of_logits,
    replicated=("denominator",),
    combined=Combined((-1,), _reduces, _linear_forward, _linear_backward),
    reason="its classes are cut, and a kernel needs all of them",
)


# ---------------------------------------------------------------------------------------------------- linear_log_probs


def _log_probs_forward(given: Mapping[str, Any], ranks: Ranks) -> tuple[Tensor, ...]:
    """Compute the log probabilities, the entropy and, if the call saves it, lse, for sharded classes."""
    check_targets("linear_log_probs", given["target"], given["ignore_index"], ranks.shard.whole[-1])
    parts = [_statistics(logits, target, given, ranks) for _, target, logits, _ in _chunks_of_logits(given, ranks)]
    results = [torch.cat(each).view(given["target"].shape) for each in zip(*parts)]
    return tuple(results) if ranks.saves else tuple(results[:2])


def _statistics(
    logits: Tensor, target: Tensor, given: Mapping[str, Any], ranks: Ranks
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log probability, the entropy and lse of rows of which this rank has some logits: (n,) each."""
    z = logits / given["temperature"]
    _, ignored, wrong = formulas.classes_of(target, given["ignore_index"], ranks.shard.whole[-1])
    z = z.masked_fill(ignored.unsqueeze(-1), 0.0)
    top = z.amax(-1) if z.shape[-1] else z.new_full(z.shape[:-1], -math.inf)  # a rank may have no class
    top = ranks.total(top, (-1,), "max")
    here, own = _own_class(target, ranks, z.shape[-1])
    picked = z.gather(-1, own.unsqueeze(-1))[..., 0] if z.shape[-1] else z.new_zeros(z.shape[:-1])
    below = z - top.masked_fill(top == -math.inf, 0.0).unsqueeze(-1)
    terms = torch.exp(below)
    sums = [terms.sum(-1), picked.masked_fill(~here, 0.0)]
    if given["return_entropy"]:
        sums.append((terms * below.masked_fill(below == -math.inf, 0.0)).sum(-1))
    total, picked, *weighted = ranks.total(torch.stack(sums), (-1,), "sum")
    rest = total.log()
    logp, lse = (picked - top) - rest, (top + rest).masked_fill(ignored, 0.0)
    entropy = rest - weighted[0] / total if weighted else torch.zeros_like(logp)
    results = [each.masked_fill(ignored, 0.0).masked_fill(wrong, math.nan) for each in (logp, entropy)]
    return results[0], results[1] if weighted else entropy, lse


def _log_probs_backward(given: Mapping[str, Any], ranks: Ranks) -> tuple[Tensor | None, ...]:
    """Compute this rank's part of the gradients of x, weight and bias, for sharded classes."""
    x, weight, bias = given["x"], given["weight"], given["bias"]
    wide = compute_dtype(promoted(x, weight))
    of_x: list[Tensor] = []
    of_weight, of_bias = torch.zeros_like(weight, dtype=wide), weight.new_zeros(weight.shape[0], dtype=wide)
    for at, target, logits, rows in _chunks_of_logits(given, ranks):
        dz = _log_prob_gradient(logits, target, at, given, ranks)
        of_x.append(formulas.product(dz, weight.to(wide)).to(x.dtype))
        of_weight = of_weight + formulas.weight_sums(dz, rows, target, given["ignore_index"])
        of_bias = of_bias + dz.sum(0)
    of_each = (torch.cat(of_x).view(x.shape), of_weight, of_bias)
    wanted = zip((x, weight, bias), of_each, given["needs"])
    return tuple(each.to(like.dtype) if need and like is not None else None for like, each, need in wanted)


def _log_prob_gradient(logits: Tensor, target: Tensor, at: slice, given: Mapping[str, Any], ranks: Ranks) -> Tensor:
    """Return the gradient of this rank's logits of some rows."""
    _, ignored, wrong = formulas.classes_of(target, given["ignore_index"], ranks.shard.whole[-1])
    of_target, of_entropy, entropy, lse = (
        given[name].reshape(-1)[at].to(logits.dtype).unsqueeze(-1)
        for name in ("grad_logp", "grad_entropy", "entropy", "lse")
    )
    of_target = of_target.masked_fill(wrong.unsqueeze(-1), math.nan)
    here, own = _own_class(target, ranks, logits.shape[-1])
    log_p = (logits / given["temperature"] - lse).clamp(max=0.0).masked_fill(ignored.unsqueeze(-1), 0.0)
    p = torch.exp(log_p)
    dz = -of_target * p
    if logits.shape[-1]:
        hit = of_target.masked_fill(~here.unsqueeze(-1), 0.0)
        dz = dz.scatter_add(-1, own.unsqueeze(-1), hit)
    if given["return_entropy"]:
        dz = dz - of_entropy * p * (log_p.masked_fill(log_p == -math.inf, 0.0) + entropy)
    dz = formulas.uncapped(dz / given["temperature"], logits, given["softcap"])
    return dz.masked_fill(ignored.unsqueeze(-1), 0.0)


def _chunks_of_logits(given: Mapping[str, Any], ranks: Ranks) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield for each chunk of rows its place, the targets, this rank's logits after the softcap, and the rows of x."""
    x, target = given["x"], given["target"].flatten()
    rows, size = x.reshape(target.numel(), x.shape[-1]), _rows_of_chunk(x, ranks)
    options = LossOptions(given["ignore_index"], 0.0, 0.0, given["softcap"], "none", None)
    for start in range(0, max(target.numel(), 1), size):
        at = slice(start, start + size)
        yield (
            at,
            target[at],
            formulas.linear_logits(rows[at], given["weight"], target[at], given["bias"], options),
            rows[at],
        )


def _dims_of_log_probs(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dims of the logits that each tensor's dims correspond to."""
    rows = tuple(range(-given["x"].dim(), -1))
    return {**_dims_of_logits(given), "entropy": rows}


def _never(given: Mapping[str, Any]) -> bool:
    """Return False: rows of other ranks are other calls."""
    return False


LINEAR_LOG_PROBS = Sharding(
    whole=(-1,),
    dims_of=_dims_of_log_probs,
    shape_of=_shape_of_logits,
    combined=Combined((-1,), _never, _log_probs_forward, _log_probs_backward),
    reason="its classes are cut, and a kernel needs all of them",
)

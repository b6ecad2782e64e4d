"""The formulas of the losses: the logits of a linear layer, the loss of each row, its gradient, and the sum; the log
probability of each target, and the entropy.

A row is the last dim of the logits, (..., V); ``target`` (...) has its class. With
``z = softcap * tanh(logits / softcap)`` (without softcap the logits) and ``lse = logsumexp(z)``, the loss of a row is

    lse - (1 - label_smoothing) * z[target] - label_smoothing * mean(z) + z_loss * lse**2

It is 0 for a row whose target is ``ignore_index``, and NaN where the target is not in [0, V).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fusedops._named_tuple import NamedTuple
from fusedops.dtypes import compute_dtype, no_autocast, promoted, upcast
from fusedops.ops.losses.arguments import LinearCrossEntropyArgs, LinearCrossEntropyGradArgs, LossOptions


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return z of the logits, in the dtype of the arithmetic."""
    z = upcast(logits)
    return z if softcap is None else torch.tanh(z / softcap) * softcap


def uncapped(dz: Tensor, z: Tensor, softcap: float | None) -> Tensor:
    """Return the gradient of the logits from the gradient of z."""
    return dz if softcap is None else dz * (1 - (z / softcap).square())


def classes_of(target: Tensor, ignore_index: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the class of each row, 0 where it has none; True for ignored rows; True for targets out of range."""
    ignored = target == ignore_index
    wrong = ((target < 0) | (target >= classes)) & ~ignored
    return target.masked_fill(ignored | wrong, 0), ignored, wrong


def logsumexp(z: Tensor) -> Tensor:
    """Return lse of each row of z: (...); -inf without classes."""
    if z.shape[-1] == 0:
        return z.new_full(z.shape[:-1], -math.inf)
    # not torch.logsumexp, which cannot be traced for sizes that depend on data (torch 2.13)
    top = z.detach().amax(-1, keepdim=True)
    top = top.masked_fill(~top.isfinite(), 0.0)
    return torch.exp(z - top).sum(-1).log() + top[..., 0]


def row_losses(z: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    """Return the loss of each row of z: (...), in the dtype of z."""
    classes, ignored, wrong = classes_of(target, options.ignore_index, z.shape[-1])
    log_prob = torch.log_softmax(z.masked_fill(ignored[..., None], 0.0), -1)
    loss = -(1 - options.label_smoothing) * log_prob.gather(-1, classes[..., None])[..., 0]
    if options.label_smoothing != 0:  # of -inf, 0 times the mean is NaN
        loss = loss - options.label_smoothing * log_prob.mean(-1)
    if options.z_loss != 0:
        lse = logsumexp(z).masked_fill(ignored, 0.0)
        loss = loss + options.z_loss * lse * lse  # the square alone may overflow
    return loss.masked_fill(ignored, 0.0).masked_fill(wrong, math.nan)


def divisor(target: Tensor, options: LossOptions, dtype: torch.dtype) -> Tensor:
    """Return what "mean" divides by, of no dims: the denominator, or the number of rows that count, at least 1."""
    if options.denominator is not None:
        return options.denominator.to(dtype).reshape(())
    return (target != options.ignore_index).sum().clamp(min=1).to(dtype)


def reduced(loss: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    """Return the losses of rows (...) as they are for "none", or their sum or mean, of no dims."""
    if options.reduction == "none":
        return loss
    total = loss.sum()
    return total if options.reduction == "sum" else total / divisor(target, options, loss.dtype)


def row_scales(grad: Tensor, target: Tensor, classes: int, options: LossOptions) -> Tensor:
    """Return the gradient of the loss of each row: (...). 0 for an ignored row, NaN where the target is out of range.

    Args:
        grad: the gradient of the reduced loss: of no dims, or (...) for "none".
        target: (...).
        classes: V.
        options: see the op.
    """
    _, ignored, wrong = classes_of(target, options.ignore_index, classes)
    if options.reduction == "mean":
        grad = grad / divisor(target, options, grad.dtype)
    return grad.expand(target.shape).masked_fill(ignored, 0.0).masked_fill(wrong, math.nan)


def logit_gradient(scale: Tensor, z: Tensor, lse: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    """Return the gradient of the logits, (..., V), by way of the gradient of z.

    The latter is ``scale * ((1 + 2.0 * z_loss * lse) * softmax(z) - smoothed one-hot)``.

    Args:
        scale: (...), see :func:`row_scales`.
        z: (..., V), see :func:`capped`.
        lse: (...), logsumexp of z.
        target: (...).
        options: see the op.
    """
    classes, ignored, _ = classes_of(target, options.ignore_index, z.shape[-1])
    probability = torch.exp(z.masked_fill(ignored[..., None], 0.0) - lse[..., None])
    if options.z_loss != 0:
        probability = probability * (1 + 2.0 * options.z_loss * lse)[..., None]
    # made from z, so that it is a DTensor if z is one. cumsum would count from the start of each shard (torch 2.13)
    hit = torch.zeros_like(z).scatter(-1, classes[..., None], 1.0)
    wanted = hit * (1 - options.label_smoothing) + options.label_smoothing / z.shape[-1]
    dz = uncapped(scale[..., None] * (probability - wanted), z, options.softcap)
    return dz.masked_fill(ignored[..., None], 0.0)  # last: the slope of the softcap is NaN at NaN


# --------------------------------------------------------------------------------------------------- the linear layer


class Wanted(NamedTuple):
    """The gradients to compute.

    Attributes:
        logits: True where that of the logits may be returned in place of that of weight.
    """

    x: bool
    weight: bool
    bias: bool
    logits: bool = False


class Gradients(NamedTuple):
    """The gradients of all rows; None for one that is not wanted.

    Attributes:
        x: (N, H), the dtype of x.
        weight: (V, H), the dtype of the arithmetic, as is ``bias`` (V,).
    """

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def rows_of_chunk(n_rows: int, size: int, classes: int, least: int, chunk: int | None = None) -> int:
    """Return the rows of a chunk: those whose logits take about the size of x, and at least ``least``.

    Args:
        n_rows: rows of x.
        size: columns of x.
        classes: columns of the logits.
        least: rows of a chunk, at least.
        chunk: the rows that the caller asks for, or None.
    """
    rows = chunk or max(least, n_rows * size // max(classes, 1))
    if chunk is None and rows < n_rows:
        rows = math.ceil(n_rows / math.ceil(n_rows / rows))  # the same number of chunks, as equal as possible
    return max(1, min(rows, n_rows))


def product(one: Tensor, other: Tensor) -> Tensor:
    """Return ``one @ other`` in their dtype, also under autocast."""
    with no_autocast(one.device.type):
        return one @ other


def linear_logits(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: LossOptions) -> Tensor:
    """Return z of each row of ``x @ weight.T + bias``: (..., V). An ignored row of x counts as 0."""
    wide = compute_dtype(promoted(x, weight))
    rows = x.to(wide).masked_fill((target == options.ignore_index)[..., None], 0.0)
    logits = product(rows, weight.to(wide).t())
    return capped(logits if bias is None else logits + bias.to(wide), options.softcap)


def linear_logit_gradient(
    scale: Tensor, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: LossOptions
) -> Tensor:
    """Return the gradient of the sum of ``scale * loss`` with respect to ``x @ weight.T + bias``: (..., V)."""
    z = linear_logits(x, weight, target, bias, options)
    return logit_gradient(scale, z, logsumexp(z), target, options)


def weight_sums(dz: Tensor, x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the gradient of weight from the gradient of the logits: (V, H)."""
    rows = x.to(dz.dtype).masked_fill((target == ignore_index)[..., None], 0.0)
    return product(dz.reshape(target.numel(), dz.shape[-1]).t(), rows.reshape(target.numel(), x.shape[-1]))


def bias_sums(dz: Tensor, target: Tensor) -> Tensor:
    """Return the gradient of bias from the gradient of the logits: (V,)."""
    # not dz.shape[:-1].numel(), by which torch.compile compiles again for each number of rows
    return dz.reshape(target.numel(), dz.shape[-1]).sum(0)


# ------------------------------------------------- linear_cross_entropy: what forward saves, and backward makes of it


class Results(NamedTuple):
    """The results of all rows; None for a gradient that is not wanted.

    Attributes:
        losses: (N,), 0 for an ignored row.
        x: (N, H), the dtype of x: the gradient of the weighted sum of the losses.
        weight: (V, H), the dtype of the arithmetic, as is ``bias`` (V,). With ``scale`` also the dtype of weight.
        logits: (N, V), the dtype of x and weight, in place of ``weight``.
    """

    losses: Tensor
    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    logits: Tensor | None = None


#: Computes the loss of each row, and the gradients of the sum of ``scale * loss``. Takes x (N, H), weight, target (N,),
#: bias, the options, the rows of a chunk or None, the gradients to compute, and scale (N,), or None for 1.
RowLosses = Callable[
    [Tensor, Tensor, Tensor, "Tensor | None", LossOptions, "int | None", Wanted, "Tensor | None"], Results
]
#: Returns a saved value times a factor in a dtype; True allows to change the saved value.
Scaled = Callable[[Tensor, Tensor, torch.dtype, bool], Tensor]


def loss_and_gradients(
    row_losses: RowLosses, a: LinearCrossEntropyArgs, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the loss and, where ``save``, the saved values: the gradients of the sum of the losses.

    Those of weight and bias are empty for reduction="none", where each row has its own incoming gradient. An argument
    that does not require a gradient has None; if none does, as in a compiled graph, all but that of the logits are
    computed.
    """
    asks = [tensor is not None and tensor.requires_grad for tensor in (a.x, a.weight, a.bias)]
    asks = asks if any(asks) else [True] * 3
    summed = a.reduction != "none"
    exists = (True, summed, summed and a.bias is not None)
    wanted = Wanted(*(save and ask and has for ask, has in zip(asks, exists)))
    wanted = wanted._replace(logits=wanted.weight and a.weight.requires_grad)
    flat, options = a.target.reshape(-1), a.options
    losses, dx, dweight, dbias, dlogits = row_losses(
        _rows(a.x, flat), a.weight, flat, a.bias, options, a.chunk, wanted, None
    )
    if save and asks[1] and not exists[1]:
        dweight = losses.new_empty(0)
    if save and (asks[2] or a.bias is None) and not exists[2]:
        dbias = losses.new_empty(0)
    return reduced(losses.view(a.target.shape), a.target, options), _like(dx, a.x), dweight, dbias, dlogits


def scaled_gradients(
    row_losses: RowLosses, a: LinearCrossEntropyGradArgs, scaled: Scaled | None = None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias from the saved values. Those that are not saved are computed again.

    From the saved gradient of the logits, that of weight is one product, straight to its dtype: the incoming gradient
    is multiplied into the rows of x, which changes no digit where it and what "mean" divides by are powers of two.

    Args:
        row_losses: see :data:`RowLosses`.
        a: of backward. ``reuse`` allows to change the saved values: a second tensor of the size of weight would be most
            of the op's memory.
        scaled: multiplies the saved values of weight and bias by a number. None: torch.
    """
    saved, given = (a.x_grad, a.weight_grad, a.bias_grad), (a.x, a.weight, a.bias)
    flat, options = a.target.reshape(-1), a.options
    factor = a.grad.to(compute_dtype(promoted(a.x, a.weight)))
    if a.reduction == "mean":
        factor = factor / divisor(a.target, options, factor.dtype)
    ignored = a.target == a.ignore_index
    factor = factor.masked_fill(ignored.all(), 0)  # a denominator of 0 times gradients of 0 is NaN
    scale = factor.expand(a.target.shape).masked_fill(ignored, 0)
    results: list[Tensor | None] = [None] * 3
    if a.needs[0] and a.x_grad is not None:
        results[0] = _scaled(a.x_grad, scale[..., None], a.x.dtype, a.reuse)
    for at in (1, 2) if a.reduction != "none" else ():
        value, like = saved[at], given[at]
        if a.needs[at] and value is not None and like is not None:
            results[at] = (scaled or _scaled)(value, factor, like.dtype, a.reuse)
    rows = _rows(a.x, flat)
    if a.needs[1] and results[1] is None and a.logits_grad is not None:
        there = rows.masked_fill(ignored.reshape(-1, 1), 0)  # 0 times NaN is NaN
        there = _scaled(there, scale.reshape(-1, 1), a.logits_grad.dtype, False)
        results[1] = product(a.logits_grad.t(), there).to(a.weight.dtype)
    lacking = Wanted(*(need and like is not None and r is None for need, like, r in zip(a.needs, given, results)))
    if any(lacking):
        again = row_losses(rows, a.weight, flat, a.bias, options, a.chunk, lacking, scale.reshape(-1))
        results = [r if each is None else _like(each, like) for r, each, like in zip(results, again[1:], given)]
    return tuple(results)


def _rows(x: Tensor, target: Tensor) -> Tensor:
    """Return x as (N, H). Not by (-1, H), which is ambiguous for H = 0."""
    return x.reshape(target.numel(), x.shape[-1])


def _like(gradient: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    """Return a gradient in the shape and dtype of its tensor."""
    return None if gradient is None or tensor is None else gradient.view(tensor.shape).to(tensor.dtype)


def _scaled(saved: Tensor, factor: Tensor, dtype: torch.dtype, reuse: bool) -> Tensor:
    """Return ``saved * factor`` in a dtype, in the memory of ``saved`` where it may be reused."""
    if reuse and saved.dtype is factor.dtype:
        return saved.mul_(factor).to(dtype)
    return torch.mul(saved, factor, out=torch.empty_like(saved, dtype=dtype))


# ------------------------------------------------------------------------------------------------- log probabilities


def log_probs(z: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the log probability of each target under softmax(z), and the entropy of the latter: (...), twice.

    Both are 0 for an ignored row, and NaN where the target is out of range. A class of logit -inf adds 0 to an entropy.
    """
    classes, ignored, wrong = classes_of(target, ignore_index, z.shape[-1])
    each = torch.log_softmax(z.masked_fill(ignored[..., None], 0.0), -1)
    of_target = each.gather(-1, classes[..., None])[..., 0]
    entropy = -(torch.exp(each) * each.masked_fill(each == -math.inf, 0.0)).sum(-1)
    return tuple(value.masked_fill(ignored, 0.0).masked_fill(wrong, math.nan) for value in (of_target, entropy))  # pyright: ignore[reportReturnType]


def log_prob_gradient(
    of_target: Tensor,
    of_entropy: Tensor | None,
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
) -> Tensor:
    """Return the gradient of the logits before the softcap, (..., V).

    With ``z = logits / temperature`` and ``p = softmax(z)``, the gradient of z is ``of_target * (one-hot - p) -
    of_entropy * p * (log(p) + entropy)``.

    Args:
        of_target: (...), the gradient of the log probabilities.
        of_entropy: (...), the gradient of the entropy, or None for 0.
        logits: (..., V), after the softcap.
        lse: (...), logsumexp of z.
        target: (...).
        temperature: see the op.
        softcap: see the op.
        ignore_index: see the op.
    """
    classes, ignored, wrong = classes_of(target, ignore_index, logits.shape[-1])
    scale = of_target.masked_fill(ignored, 0.0).masked_fill(wrong, math.nan)[..., None]
    # at most 0, which a difference of large numbers may exceed by their roundings
    log_p = (logits / temperature - lse[..., None]).clamp(max=0.0).masked_fill(ignored[..., None], 0.0)
    p = torch.exp(log_p)
    hit = torch.zeros_like(logits).scatter(-1, classes[..., None], 1.0)
    dz = scale * (hit - p)
    if of_entropy is not None:
        finite = log_p.masked_fill(log_p == -math.inf, 0.0)
        dz = dz - of_entropy[..., None] * p * (finite - (p * finite).sum(-1, keepdim=True))
    return uncapped(dz / temperature, logits, softcap).masked_fill(ignored[..., None], 0.0)

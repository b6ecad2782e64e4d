"""linear_cross_entropy in plain torch: the rows in chunks, each of whose logits become their own gradient in place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, promoted
from fusedops.ops.losses import formulas
from fusedops.ops.losses.formulas import LossOptions, Wanted
from fusedops_eager._chunks import in_chunks, slabs_of


class Results(NamedTuple):
    """The results of all rows; None for one that is not wanted.

    Attributes:
        losses: (N,), 0 for an ignored row.
        x: (N, H), the dtype of x: the gradient of the weighted sum of the losses.
        weight: (V, H), the dtype of the arithmetic, as is ``bias`` (V,).
    """

    losses: Tensor
    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    chunk: int | None,
    save: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the loss and, where ``save``, the gradients of the sum of the losses that are wanted.

    Those of weight and bias are empty for reduction="none", where each row has its own incoming gradient. An argument
    that does not require a gradient has None; if none does, as in a compiled graph, all are computed.
    """
    given = (x, weight, bias)
    asks = [tensor is not None and tensor.requires_grad for tensor in given]
    if not any(asks):
        asks = [True] * 3
    exists = (True, options.reduction != "none", options.reduction != "none" and bias is not None)
    wanted = Wanted(*(save and ask and has for ask, has in zip(asks, exists)))
    flat = target.reshape(-1)
    results = row_losses(x.reshape(flat.numel(), x.shape[-1]), weight, flat, bias, options, chunk, wanted)
    losses = results.losses
    loss = formulas.reduced(losses.view(target.shape), target, options)
    dx, dweight, dbias = results[1:]
    if save and not exists[1] and asks[1]:
        dweight = losses.new_empty(0)
    if save and not exists[2] and (asks[2] or bias is None):
        dbias = losses.new_empty(0)
    return loss, None if dx is None else dx.view(x.shape), dweight, dbias


def scaled_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    saved: tuple[Tensor | None, ...],
    options: LossOptions,
    chunk: int | None,
    needs: tuple[bool, ...],
    reuse: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias from those of the sum of the losses, ``saved``.

    What is not saved is computed by the chunks again. With ``reuse``, ``saved`` may be changed: a second tensor of the
    size of weight would be most of the memory that the op takes.
    """
    given, flat, total = (x, weight, bias), target.reshape(-1), options.reduction != "none"
    grad = grad.reshape(-1) if not total else grad
    factor = grad / formulas.divisor(flat, options, grad.dtype) if options.reduction == "mean" else grad
    scale = factor.expand(flat.shape).masked_fill(flat == options.ignore_index, 0)
    results: list[Tensor | None] = [None, None, None]
    if needs[0] and saved[0] is not None:
        rows = scale.view(target.shape)[..., None]
        results[0] = (saved[0].mul_(rows) if reuse and rows.dtype is x.dtype else saved[0] * rows).to(x.dtype)
    for at in (1, 2) if total else ():
        value, like = saved[at], given[at]
        if needs[at] and value is not None and like is not None:
            product = value.mul_(factor) if reuse else value * factor
            results[at] = product.to(like.dtype)
    lacking = Wanted(*(need and like is not None and r is None for need, like, r in zip(needs, given, results)))
    if any(lacking):
        again = row_losses(x.reshape(flat.numel(), x.shape[-1]), weight, flat, bias, options, chunk, lacking, scale)
        for at, (like, gradient) in enumerate(zip(given, again[1:])):
            if gradient is not None and like is not None:
                results[at] = gradient.view(like.shape).to(like.dtype)
    return tuple(results)


def row_losses(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    chunk: int | None,
    wanted: Wanted,
    scale: Tensor | None = None,
) -> Results:
    """Compute the loss of each row, and the gradients of the sum of ``scale * loss``.

    Args:
        x: (N, H).
        weight: (V, H).
        target: (N,), int64.
        bias: (V,) or None.
        options: of the loss.
        chunk: the rows of a chunk, or None.
        wanted: the gradients to compute.
        scale: (N,), the weight of each row in the sum, or None for 1.
    """
    losses = x.new_zeros(x.shape[0], dtype=compute_dtype(promoted(x, weight)))

    def turn(logits: Tensor, targets: Tensor, at: slice | Tensor) -> None:
        weights = None if scale is None else scale[at].to(losses.dtype)
        losses[at] = _softmax_gradient(logits, targets, options, weights, any(wanted))

    return Results(losses, *in_chunks(x, weight, target, bias, options.ignore_index, chunk, wanted, turn))


def _softmax_gradient(
    logits: Tensor, target: Tensor, options: LossOptions, scale: Tensor | None, gradient: bool
) -> Tensor:
    """Return the loss of each row, and turn the logits into the gradient of ``scale * loss`` in place.

    Args:
        logits: (N, V), contiguous; not written to any purpose without ``gradient``.
        target: (N,).
        options: of the loss.
        scale: (N,) or None.
        gradient: True where the gradient is wanted.
    """
    losses = logits.new_empty(logits.shape[0])
    for at in slabs_of(logits):
        weights = None if scale is None else scale[at]
        losses[at] = _rows_in_place(logits[at], target[at], options, weights, gradient)
    return losses


def _rows_in_place(z: Tensor, target: Tensor, options: LossOptions, scale: Tensor | None, gradient: bool) -> Tensor:
    """Compute what :func:`_softmax_gradient` computes, for rows that fit the cache."""
    classes, (_, smoothing, z_loss, softcap, *_) = z.shape[1], options
    on_cpu = z.device.type == "cpu"
    if classes == 0:
        nothing = torch.full_like(target, float("nan"), dtype=z.dtype)
        return nothing if on_cpu else nothing.masked_fill(target == options.ignore_index, 0)
    outside = None if on_cpu else (target < 0) | (target >= classes)
    place = (target if outside is None else target.masked_fill(outside, 0))[:, None]
    slope: Tensor | None = None
    if softcap is not None:
        z.div_(softcap).tanh_()
        if gradient:
            slope = z.square().neg_().add_(1)  # of c * tanh(x / c)
        z.mul_(softcap)
    # a row of -inf has no maximum to subtract; a row with inf has the loss that the formula gives: NaN
    largest = z.amax(1, keepdim=True)
    largest.masked_fill_(largest == -torch.inf, 0)
    z.sub_(largest)
    picked = z.gather(1, place)
    mean = z.mean(1, keepdim=True) if smoothing else None
    total = z.exp_().sum(1, keepdim=True)
    log_total = total.log()
    loss = log_total - picked * (1 - smoothing)
    if mean is not None:
        loss -= smoothing * mean
    lse = log_total + largest
    if z_loss:
        loss += (z_loss * lse).mul_(lse)  # the square alone may overflow
    if gradient:
        weights = torch.ones_like(total) if scale is None else scale[:, None]
        factor = weights * (1 + 2.0 * z_loss * lse) if z_loss else weights
        z.mul_(factor / total)
        if smoothing:
            z.sub_(weights * (smoothing / classes))
        z.scatter_add_(1, place, weights * (smoothing - 1))
        if slope is not None:
            z.mul_(slope)
    loss = loss.view(-1)
    if outside is not None:
        ignored = target == options.ignore_index
        loss = loss.masked_fill(outside, torch.nan).masked_fill_(ignored, 0)
        if gradient:
            z.masked_fill_(outside[:, None], torch.nan).masked_fill_(ignored[:, None], 0)
    return loss

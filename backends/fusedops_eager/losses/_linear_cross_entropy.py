"""linear_cross_entropy in plain torch: the rows in chunks, each of whose logits become their own gradient in place."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, promoted
from fusedops.ops.losses.arguments import LinearCrossEntropyArgs, LinearCrossEntropyGradArgs, check_targets
from fusedops.ops.losses.formulas import LossOptions, Results, Wanted, loss_and_gradients, scaled_gradients
from fusedops_eager._chunks import in_chunks, slabs_of


def linear_cross_entropy(
    a: LinearCrossEntropyArgs, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the loss in chunks of rows, and the gradients of its sum over the rows."""
    check_targets("linear_cross_entropy", a.target, a.ignore_index, a.weight.shape[0])
    return loss_and_gradients(row_losses, a, save)


def linear_cross_entropy_backward(a: LinearCrossEntropyGradArgs) -> tuple[Tensor | None, ...]:
    """Multiply the gradients of forward by the incoming one; compute again what forward could not."""
    return scaled_gradients(row_losses, a)


def row_losses(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    chunk: int | None,
    wanted: Wanted,
    scale: Tensor | None,
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
        losses[at], _ = rows_in_place(logits[at], target[at], options, weights, gradient)
    return losses


def rows_in_place(
    z: Tensor, target: Tensor, options: LossOptions, scale: Tensor | None, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Compute what :func:`_softmax_gradient` computes, and lse, for rows that fit the cache.

    Args:
        z: (N, V), the logits; overwritten.
        target: (N,), of rows that count or are ignored; out of range, the loss is NaN.
        options: of the loss.
        scale: (N,) or None.
        gradient: True where z becomes the gradient.
    """
    classes, (_, smoothing, z_loss, softcap, *_) = z.shape[1], options
    if classes == 0:
        nothing = torch.full_like(target, float("nan"), dtype=z.dtype)
        return nothing.masked_fill(target == options.ignore_index, 0), nothing
    ignored = target == options.ignore_index
    outside: Tensor | None = (target < 0) | (target >= classes)
    if z.is_cpu and not (outside | ignored).any():  # as the rows of a chunk
        outside = None
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
    loss, lse = loss.view(-1), lse.view(-1)
    if outside is not None:
        loss = loss.masked_fill(outside, torch.nan).masked_fill_(ignored, 0)
        lse = lse.masked_fill(ignored, 0)
        if gradient:
            z.masked_fill_(outside[:, None], torch.nan).masked_fill_(ignored[:, None], 0)
    return loss, lse

"""The shared parts of the cross entropy ops: the loss of each row, its gradient, and the sum over rows.

A row is the last dim of the logits, (..., V); ``target`` (...) has its class. The arithmetic is float32, float64 for
float64. With ``z = softcap * tanh(logits / softcap)`` (the logits, without softcap) and ``lse = logsumexp(z)``, the
loss of a row is

    lse - (1 - label_smoothing) * z[target] - label_smoothing * mean(z) + z_loss * lse**2

It is 0 for a row whose target is ``ignore_index``, and NaN where the target is not in [0, V). The other
arguments are in ``arguments.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic and of the loss: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return z of the logits, in the dtype of the arithmetic."""
    z = logits.to(wide_dtype(logits.dtype))
    return z if softcap is None else torch.tanh(z / softcap) * softcap


def places(target: Tensor, ignore_index: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the class of each row, 0 where it has none; True for ignored rows; True for targets out of range."""
    ignored = target == ignore_index
    wrong = ((target < 0) | (target >= classes)) & ~ignored
    return target.masked_fill(ignored | wrong, 0), ignored, wrong


def logsumexp(z: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return lse of each row of z, 0 for an ignored row: (...)."""
    # not torch.logsumexp, which cannot be traced for sizes that depend on data (torch 2.13)
    top = z.detach().amax(-1, keepdim=True)
    top = top.masked_fill(~top.isfinite(), 0.0)
    sums = torch.exp(z - top).sum(-1).log() + top[..., 0]
    return sums.masked_fill(target == ignore_index, 0.0)


def row_losses(z: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float) -> Tensor:
    """Return the loss of each row of z: (...), in the dtype of z."""
    classes, ignored, wrong = places(target, ignore_index, z.shape[-1])
    log_prob = torch.log_softmax(z.masked_fill(ignored[..., None], 0.0), -1)
    loss = -(1 - label_smoothing) * log_prob.gather(-1, classes[..., None])[..., 0]
    if label_smoothing != 0:  # of -inf, 0 times the mean is NaN
        loss = loss - label_smoothing * log_prob.mean(-1)
    if z_loss != 0:
        loss = loss + z_loss * logsumexp(z, target, ignore_index).square()
    return loss.masked_fill(ignored, 0.0).masked_fill(wrong, math.nan)


def divisor(target: Tensor, ignore_index: int, denominator: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what "mean" divides by, of no dims: the denominator, or the number of rows that count, at least 1."""
    if denominator is not None:
        return denominator.to(dtype).reshape(())
    return (target != ignore_index).sum().clamp(min=1).to(dtype)


def reduced(loss: Tensor, target: Tensor, ignore_index: int, reduction: str, denominator: Tensor | None) -> Tensor:
    """Return the losses of rows (...) as they are for "none", or their sum or mean, of no dims."""
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / divisor(target, ignore_index, denominator, loss.dtype)


def row_scales(
    grad: Tensor, target: Tensor, ignore_index: int, classes: int, reduction: str, denominator: Tensor | None
) -> Tensor:
    """Return the gradient of the loss of each row: (...). 0 for an ignored row, NaN where the target is out of range.

    Args:
        grad: the gradient of the reduced loss: of no dims, or (...) for "none".
        target: (...).
        ignore_index: see the op.
        classes: V.
        reduction: see the op.
        denominator: see the op.
    """
    _, ignored, wrong = places(target, ignore_index, classes)
    if reduction == "mean":
        grad = grad / divisor(target, ignore_index, denominator, grad.dtype)
    return grad.expand(target.shape).masked_fill(ignored, 0.0).masked_fill(wrong, math.nan)


def logit_gradient(
    scale: Tensor, z: Tensor, lse: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> Tensor:
    """Return the gradient of z: ``scale * ((1 + 2.0 * z_loss * lse) * softmax(z) - smoothed one-hot)``: (..., V).

    Args:
        scale: (...), see :func:`row_scales`.
        z: (..., V), see :func:`capped`.
        lse: (...), logsumexp of z.
        target: (...).
        ignore_index: see the op.
        label_smoothing: see the op.
        z_loss: see the op.
    """
    classes, ignored, _ = places(target, ignore_index, z.shape[-1])
    probability = torch.exp(z.masked_fill(ignored[..., None], 0.0) - lse[..., None])
    if z_loss != 0:
        probability = probability * (1 + 2.0 * z_loss * lse)[..., None]
    # made of z, so that it is a DTensor where z is one. Not by cumsum, which then counts from the start of each part
    # (torch 2.13)
    hit = torch.zeros_like(z).scatter(-1, classes[..., None], 1.0)
    wanted = hit * (1 - label_smoothing) + label_smoothing / z.shape[-1]
    return (scale[..., None] * (probability - wanted)).masked_fill(ignored[..., None], 0.0)


def uncapped(dz: Tensor, z: Tensor, softcap: float | None) -> Tensor:
    """Return the gradient of the logits from that of z."""
    return dz if softcap is None else dz * (1 - (z / softcap).square())

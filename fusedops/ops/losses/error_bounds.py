"""The error model of cross entropy: the changes of loss and gradient where each number moves by ``absolute`` of itself.

A number of the loss is a difference of logits, and a probability the exponential of one: both move by ``absolute``
times the size of the logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedops.ops.losses import formulas


def forward_error(
    absolute: float,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    denominator: Tensor | None,
    *save: Any,
) -> tuple[Tensor, ...]:
    """Return the changes of the loss, and of the saved values; inf for lse where a row of logits has no largest."""
    z = formulas.capped(logits.double(), softcap)
    size = z.abs().nan_to_num(nan=0.0, posinf=0.0)
    rows = absolute * (1 + 2 * size.amax(-1))
    lse = formulas.logsumexp(z, target, ignore_index)
    unknown = ~lse.isfinite()
    known = lse.masked_fill(unknown, 0.0)
    loss = rows * (1 + 2.0 * z_loss * known.abs()) + absolute * z_loss * known.square()
    if label_smoothing != 0:  # a sum of differences
        overflows = 2 * size.sum(-1) >= torch.finfo(formulas.wide_dtype(logits.dtype)).max
        loss = loss.masked_fill(overflows, math.inf)
    if reduction != "none":
        counted = loss.masked_fill(target == ignore_index, 0.0)
        terms = formulas.row_losses(z, target, ignore_index, label_smoothing, z_loss).abs()
        total = counted.sum() + absolute * terms.nan_to_num(nan=0.0, posinf=0.0).sum()
        loss = total
        if reduction == "mean":
            loss = total / formulas.divisor(target, ignore_index, denominator, total.dtype).abs()
    return loss, rows.masked_fill(unknown, math.inf), (rows + absolute * known.abs())[..., None] + absolute * size


def backward_error(
    absolute: float,
    grad: Tensor,
    logits: Tensor,
    log_prob: Tensor | None,
    lse: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    denominator: Tensor | None,
) -> Tensor:
    """Return the changes of the gradient of the logits; inf where a product may overflow."""
    z, size = formulas.capped(logits.double(), softcap), lse.double()[..., None]
    classes, wide = z.shape[-1], grad.double()
    given = None if denominator is None else denominator.double()
    scale = formulas.row_scales(wide, target, ignore_index, classes, reduction, given).abs()[..., None]
    moves = absolute * (2 + 2 * z.abs() + size.abs())
    weight, of_lse = 1 + 4 * z_loss * size.abs(), 2 * absolute * (1 + z.abs().nan_to_num(posinf=0.0).amax(-1, True))
    hit = torch.arange(classes) == target[..., None]
    wanted = hit.double() * (1 - label_smoothing) + label_smoothing / classes
    probability = torch.exp(z - size)
    arithmetic = torch.finfo(formulas.wide_dtype(logits.dtype))
    least = arithmetic.smallest_normal  # an exponential below it may be 0
    change = scale * ((probability * moves + least) * weight + absolute * wanted + 2 * z_loss * probability * of_lse)
    if softcap is not None:
        slope = 1 - (z / softcap).square()
        change = change * slope + absolute * scale * (probability * weight + wanted) * 4
    return change.masked_fill(scale * weight >= arithmetic.max, math.inf)  # their product may come first

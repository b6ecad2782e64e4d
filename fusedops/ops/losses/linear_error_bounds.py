"""The error model of linear_cross_entropy: the errors of the logits, and what they do to the losses and gradients.

A logit is a sum of H products, whose rounding errors grow as the root of the sum of their squares. Kernels of 16-bit
tensors may round the logits and their gradient to 16 bits, as torch.nn.Linear does. An error e of the logits of a row
is one of at most 2 e of its loss, and changes its probabilities by a factor of at most exp(2 e).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.values import Tolerance
from fusedops.ops.losses import formulas
from fusedops.ops.losses import linear_formulas as linear

TOLERANCE = {
    torch.float16: Tolerance(1e-6, 2e-3),
    torch.bfloat16: Tolerance(1e-6, 1.6e-2),
    torch.float32: Tolerance(1e-6, 5e-6),
    torch.float64: Tolerance(1e-14, 1e-13),
}
_SPREAD = 4  # times the root of the sum of the squares of errors that have no common sign
GRADIENT_TOLERANCE = {
    # relative: forward rounds the gradient of x, and backward rounds the product
    torch.float16: Tolerance(1e-6, 4e-3),
    torch.bfloat16: Tolerance(1e-6, 3e-2),
    torch.float32: Tolerance(1e-6, 1e-5),
    torch.float64: Tolerance(1e-14, 1e-13),
}


def error(
    absolute: float,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    denominator: Tensor | None,
    chunk: int | None,
    save: bool = False,
) -> tuple[Tensor, ...]:
    """Return the largest errors of the loss and of the saved gradients."""
    options = (ignore_index, label_smoothing, z_loss, softcap)
    losses, logits, narrow = _errors(absolute, x, weight, target, bias, *options)
    kept = target != ignore_index
    loss = formulas.reduced(losses * kept, target, ignore_index, reduction, None)
    if denominator is not None:
        loss = (losses * kept).sum() / denominator.abs().double().reshape(())
    of_logits = (logits * kept[..., None], narrow * kept[..., None])
    return (loss, *_of_gradients(*of_logits, x, weight, bias, reduction != "none"))


def gradient_error(
    absolute: float,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    x_grad: Tensor | None,
    weight_grad: Tensor | None,
    bias_grad: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    denominator: Tensor | None,
    chunk: int | None,
    reuse: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    """Return the largest errors of the gradients of x, weight and bias."""
    _, logits, narrow = _errors(absolute, x, weight, target, bias, ignore_index, label_smoothing, z_loss, softcap)
    scale = formulas.row_scales(grad.double(), target, ignore_index, weight.shape[0], reduction, denominator)
    scale = scale.abs()[..., None]
    return _of_gradients(logits * scale, narrow * scale, x, weight, bias, True)


def _errors(
    absolute: float,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the errors of the loss of each row, (...), and two of the gradient of its logits, (..., V).

    The first is of the arithmetic, the second of roundings to 16 bits, which have no common sign in several rows.
    """
    wide_bias = None if bias is None else bias.double()
    z = linear.capped_logits(x.double(), weight.double(), target, wide_bias, ignore_index, softcap)
    classes, *_ = formulas.places(target, ignore_index, z.shape[-1])
    terms = (_size(x).square() @ _size(weight).square().t()).sqrt()
    if bias is not None:
        terms = terms + _size(bias)
    eps = max((torch.finfo(t.dtype).eps for t in (x, weight) if t.dtype.itemsize == 2), default=0.0)
    # the smallest number of float16: each smaller probability is it, or 0
    least = torch.finfo(torch.float16).tiny * eps if torch.float16 in (x.dtype, weight.dtype) else 0.0
    lse = torch.logsumexp(z, -1, keepdim=True)
    p = torch.exp(z - lse)
    factor = (1 + 2.0 * z_loss * lse).abs()
    hit = torch.arange(z.shape[-1], device=z.device) == classes[..., None]
    size = p * factor + hit.double() + label_smoothing / max(z.shape[-1], 1)
    of_sum = absolute * (4 + max(target.numel(), z.shape[-1]) ** 0.5)  # over rows for weight, over classes for x

    def of_row(narrow: float) -> tuple[Tensor, Tensor]:
        """Return the error of the loss, and of the logits' gradient, where logits have that rounding."""
        # a narrow logit has the rounding of itself; the terms are its usual size
        of_logits = ((absolute + narrow) * terms + narrow * _size(z)).amax(-1, keepdim=True)
        if softcap is not None:
            of_logits = of_logits.clamp(max=2 * softcap)
        of_probability = (torch.expm1(2 * of_logits) * p).clamp(max=1.0)
        of_slope = 0.0 if softcap is None else (2 * of_logits / softcap).clamp(max=1.0)
        dz = factor * of_probability + 2.0 * z_loss * of_logits * p + (of_sum + narrow + of_slope) * size + least
        of_loss = (2 * of_logits + 2 * absolute * _size(lse)) * (1 + 2.0 * z_loss * _size(lse))
        return of_loss[..., 0].nan_to_num(nan=0.0), dz.nan_to_num(nan=0.0)

    of_loss, every = of_row(eps)
    arithmetic = of_row(0.0)[1] if eps else every
    return of_loss, arithmetic, every - arithmetic


def _of_gradients(
    logits: Tensor, narrow: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, summed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the errors of the gradients of x, weight and bias, from those of the gradient of the logits."""
    rows, rounding = (each.reshape(x.shape[:-1].numel(), weight.shape[0]) for each in (logits, narrow))
    of_x = (logits + narrow) @ _size(weight)
    nothing = rows.new_zeros(0)
    if not summed:
        return of_x, nothing, nothing
    inputs = _size(x).reshape(rows.shape[0], x.shape[-1])
    # equal rows of x have equal roundings
    equal = 1
    if inputs.numel() and rounding.any():
        counts: Tensor = cast("Any", inputs).unique(dim=0, return_counts=True)[1]
        equal = int(counts.max())
    squares, spread = rounding.square().t(), _SPREAD * equal**0.5
    of_weight = rows.t() @ inputs + spread * (squares @ inputs.square()).sqrt()
    return of_x, of_weight, nothing if bias is None else rows.sum(0) + spread * squares.sum(1).sqrt()


def _size(tensor: Tensor) -> Tensor:
    """Return the magnitudes in float64, and 0 for what is not finite: it has no error."""
    return tensor.double().abs().nan_to_num(nan=0.0, posinf=0.0)

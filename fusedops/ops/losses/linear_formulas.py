"""The shared parts of linear_cross_entropy: the logits of the reference, its saved gradients, and its backward.

The saved values are the gradients of the sum of the losses, whatever the reduction: backward multiplies them by the
incoming gradient, and "mean" divides there. The numbers of a mean over many rows may be too small for float16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops.ops.losses import formulas


def capped_logits(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int, softcap: float | None
) -> Tensor:
    """Return z of each row, (..., V), in the dtype of the arithmetic. An ignored row of x counts as 0."""
    wide = arithmetic(x, weight)
    rows = x.to(wide).masked_fill((target == ignore_index)[..., None], 0.0)
    logits = product(rows, weight.to(wide).t())
    return formulas.capped(logits if bias is None else logits + bias.to(wide), softcap)


def product(one: Tensor, other: Tensor) -> Tensor:
    """Return ``one @ other`` in their dtype, also under autocast, which would narrow it."""
    device = one.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return one @ other
    return one @ other


def logsumexp(z: Tensor) -> Tensor:
    """Return torch's logsumexp of each row, whose shape function cannot have a number of rows that depends on data."""
    if z.shape[-1] == 0:
        return torch.logsumexp(z, -1)
    top = z.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top.isinf(), 0.0)
    return (torch.exp(z - top).sum(-1, keepdim=True).log() + top)[..., 0]


def arithmetic(x: Any, weight: Any) -> torch.dtype:
    """Return the dtype of the arithmetic and of the loss."""
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


def logit_gradient(
    scale: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    """Return the gradient of the logits of the sum of ``scale * loss``: (..., V)."""
    z = capped_logits(x, weight, target, bias, ignore_index, softcap)
    lse = logsumexp(z)
    dz = formulas.logit_gradient(scale, z, lse, target, ignore_index, label_smoothing, z_loss)
    return formulas.uncapped(dz, z, softcap)


def _ones(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the weight of each row in the sum of losses, see ``row_scales``."""
    one = torch.ones_like(target, dtype=arithmetic(x, weight))
    return formulas.row_scales(one, target, ignore_index, weight.shape[0], "sum", None)


def x_grad(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    """Compute the saved value: the gradient of the sum of the losses with respect to x."""
    options = (ignore_index, label_smoothing, z_loss, softcap)
    g = logit_gradient(_ones(x, weight, target, ignore_index), x, weight, target, bias, *options)
    return product(g, weight.to(g.dtype)).to(x.dtype)


def weight_grad(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> Tensor:
    """Compute the saved value of weight, in float32 or float64. Empty for "none", whose rows are scaled first."""
    if reduction == "none":
        return x.new_empty(0, dtype=arithmetic(x, weight))
    options = (ignore_index, label_smoothing, z_loss, softcap)
    g = logit_gradient(_ones(x, weight, target, ignore_index), x, weight, target, bias, *options)
    return weight_sums(g, x, target, ignore_index)


def bias_grad(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> Tensor:
    """Compute the saved value of bias, as :func:`weight_grad`. Empty without a bias too."""
    if reduction == "none" or bias is None:
        return x.new_empty(0, dtype=arithmetic(x, weight))
    options = (ignore_index, label_smoothing, z_loss, softcap)
    g = logit_gradient(_ones(x, weight, target, ignore_index), x, weight, target, bias, *options)
    return g.reshape(target.numel(), g.shape[-1]).sum(0)


def weight_sums(g: Tensor, x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return the gradient of weight from that of the logits: (V, H)."""
    rows = x.to(g.dtype).masked_fill((target == ignore_index)[..., None], 0.0)
    return product(g.reshape(target.numel(), g.shape[-1]).t(), rows.reshape(target.numel(), x.shape[-1]))


def sum_factor(grad: Tensor, target: Tensor, ignore_index: int, reduction: str, denominator: Tensor | None) -> Tensor:
    """Return what the gradients of the sum of the losses are multiplied by, of no dims. Not for "none"."""
    return grad if reduction == "sum" else grad / formulas.divisor(target, ignore_index, denominator, grad.dtype)


def backward(
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
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight and bias."""
    wide, summed = arithmetic(x, weight), reduction != "none"
    scale = formulas.row_scales(grad.to(wide), target, ignore_index, weight.shape[0], reduction, denominator)
    dx = dweight = dbias = None
    if needs[0] and x_grad is not None:
        dx = (x_grad.to(wide) * scale[..., None]).to(x.dtype)
    if summed and (weight_grad is not None or bias_grad is not None):
        factor = sum_factor(grad.to(wide), target, ignore_index, reduction, denominator)
        if needs[1] and weight_grad is not None:
            dweight = (weight_grad * factor).to(weight.dtype)
        if needs[2] and bias_grad is not None and bias is not None:
            dbias = (bias_grad * factor).to(bias.dtype)
    lacking = (needs[0] and dx is None, needs[1] and dweight is None, needs[2] and dbias is None and bias is not None)
    if any(lacking):
        g = logit_gradient(scale, x, weight, target, bias, ignore_index, label_smoothing, z_loss, softcap)
        if lacking[0]:
            dx = product(g, weight.to(wide)).to(x.dtype)
        if lacking[1]:
            dweight = weight_sums(g, x, target, ignore_index).to(weight.dtype)
        if lacking[2] and bias is not None:
            dbias = g.reshape(target.numel(), g.shape[-1]).sum(0).to(bias.dtype)
    return dx, dweight, dbias

"""The error bounds of the ops with a bias: ``absolute`` times the magnitudes of the terms of an element."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, promoted
from fusedops.ops.bias.bias_gelu import summed
from fusedops.philox import dropped


def _magnitude(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``abs(x) + abs(bias)``, and 0 for numbers that are not finite: they have no error."""
    size = x.abs().nan_to_num(nan=0.0, posinf=0.0)
    return size if bias is None else size + bias.abs().nan_to_num(nan=0.0, posinf=0.0)


def bias_dropout_error_bound(
    absolute: float, x: Tensor, bias: Tensor | None, p: float, training: bool, seed: Tensor | None
) -> Tensor:
    """Return ``absolute`` times the magnitudes of the terms, where an element is kept."""
    wide = compute_dtype(promoted(x, bias))
    size = _magnitude(x.to(wide), None if bias is None else bias.to(wide))
    return absolute * dropped(size, p, seed if training and p > 0 else None)


def gradient_error_bound(
    absolute: float,
    grad: Tensor,
    seed: Tensor | None,
    bias: Tensor | None,
    p: float,
    training: bool,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor, Tensor | None]:
    """Return the error of the scale for x, and for the bias of its sum; of float32 also where the result is wider."""
    wide = compute_dtype(grad.dtype)
    size = dropped(_magnitude(grad.to(wide)), p, seed if training and p > 0 else None)
    least = 4 * torch.finfo(wide).eps
    return least * size, None if bias is None else max(absolute, least) * size.sum_to_size(bias.shape)


def bias_dropout_add_error_bound(
    absolute: float, x: Tensor, bias: Tensor | None, residual: Tensor, p: float, training: bool, seed: Tensor | None
) -> Tensor:
    """Return ``absolute`` times the magnitudes of the terms, and what x and bias lose in the residual's dtype."""
    out = residual.dtype
    wide = compute_dtype(out)
    drawn = seed if training and p > 0 else None
    size = dropped(_magnitude(x.to(wide), None if bias is None else bias.to(wide)), p, drawn)
    lost = _lost(x, out) if bias is None else _lost(x, out) + _lost(bias, out)
    return absolute * (size + _magnitude(residual.to(wide))).double() + dropped(lost, p, drawn)


def _lost(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what the conversion to a dtype changes; inf where it overflows."""
    return (tensor.to(dtype).double() - tensor.double()).abs().nan_to_num(nan=0.0, posinf=math.inf)


def bias_gelu_error_bound(absolute: float, x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Return ``absolute * abs(x + bias)``: 1 + tanh and 1 + erf cancel below 0, and are constant beyond 10."""
    u = summed(x, bias)
    overflow = (2 * u).isinf() & x.isfinite() & (True if bias is None else bias.isfinite())
    return (absolute * u.abs().clamp(max=10.0)).masked_fill(overflow, math.inf)


def bias_gelu_gradient_error_bound(
    absolute: float, grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor, Tensor | None]:
    """Return ``absolute`` times a bound of the derivative, which falls off below 0; its sum for the bias."""
    u = summed(x, bias)
    slope = 0.02 + torch.exp(-0.25 * u.clamp(max=0.0).square())  # 0.02: where 1 + tanh cancels
    # the derivative of tanh is 0 * inf where the square overflows, or 0 or 1
    du = (absolute * grad.to(u.dtype).abs() * slope).masked_fill(u.square().isinf(), math.inf)
    return du, None if bias is None else du.sum_to_size(bias.shape)

"""The error bounds of bias_gelu: the changes of the results where each sum moves by ``absolute`` of its size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops.ops.gelu.bias_gelu import summed


def error_bound(absolute: float, x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Return ``absolute * abs(x + bias)``: 1 + tanh and 1 + erf cancel below 0, and are constant beyond 10."""
    u = summed(x, bias)
    overflow = (2 * u).isinf() & x.isfinite() & (True if bias is None else bias.isfinite())
    return (absolute * u.abs().clamp(max=10.0)).masked_fill(overflow, math.inf)


def gradient_error_bound(
    absolute: float, grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor, Tensor | None]:
    """Return ``absolute`` times a bound of the derivative, which falls off below 0; its sum for the bias."""
    u = summed(x, bias)
    slope = 0.02 + torch.exp(-0.25 * u.clamp(max=0.0).square())  # 0.02: where 1 + tanh cancels
    # the derivative of tanh is 0 * inf where the square overflows, or 0 or 1
    du = (absolute * grad.to(u.dtype).abs() * slope).masked_fill(u.square().isinf(), math.inf)
    return du, None if bias is None else du.sum_to_size(bias.shape)

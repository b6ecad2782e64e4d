"""The error bounds of group_norm: those of LayerNorm of its groups, and of the silu after it."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype
from fusedops.ops.gated.error_bounds import gate_errors
from fusedops.ops.group_norm import formulas
from fusedops.ops.group_norm.arguments import SILU, GroupNormArgs, GroupNormGradArgs
from fusedops.ops.norms.error_bounds import (
    drift,
    gradient_errors,
    of_arithmetic,
    of_gradients,
    output_errors,
    sum_errors,
)

_SLOPE, _BEND = 1.1, 0.5  # the largest first and second derivative of silu


def error_bound(absolute: float, a: GroupNormArgs, save: bool) -> tuple[Tensor, ...]:
    """Return the changes of y, the mean and rstd."""
    absolute = of_arithmetic(absolute, a.x)
    rows = formulas.rows_of(a.x, a.groups)
    weight, bias = _by_channel(a, rows)
    y, mean, rstd = output_errors(absolute, rows, weight, weight.abs(), bias, a.eps, centered=True)
    if a.activation == SILU:
        wide = rows.double()
        z = formulas.normalized(wide, formulas.rstd_of(wide, a.eps, True), formulas.mean_of(wide)) * weight + bias
        arithmetic = torch.finfo(compute_dtype(a.x.dtype))
        y = gate_errors(absolute, z, SILU, arithmetic).act_moves + _SLOPE * y
    return y.expand(rows.shape).reshape(a.x.shape), mean, rstd


def gradient_error_bound(absolute: float, a: GroupNormGradArgs) -> tuple[Tensor | None, ...]:
    """Return the changes of the gradients of x, weight and bias."""
    rows, grad = formulas.rows_of(a.x, a.groups), formulas.rows_of(a.grad, a.groups).double()
    weight, bias = _by_channel(a, rows)
    grad_moves = None
    if a.activation == SILU:
        unit, arithmetic = of_gradients(absolute, rows), torch.finfo(compute_dtype(a.x.dtype))
        normal = formulas.normalized(rows.double(), a.rstd.double(), a.mean.double())
        z = normal * weight + bias
        # of the saved mean, and of rstd, which may be off by more where a group is nearly one number
        size = rows.double().abs() + rows.double().abs().mean(-1, keepdim=True)
        spread = unit * size * a.rstd.double().abs()[..., None]
        of_rstd = unit + (spread * normal.abs()).mean(-1, keepdim=True)
        z_moves = (spread + normal.abs() * (unit + of_rstd)) * weight.abs() + unit * (z.abs() + bias.abs())
        errors = gate_errors(unit, z, SILU, arithmetic)
        grad_moves = grad.abs() * (errors.slope_moves + (_BEND * z_moves).nan_to_num(nan=2.0).clamp(max=2.0))
        grad = grad * errors.slope
    moves = gradient_errors(absolute, grad, rows, a.mean, a.rstd, weight, weight.abs(), grad_moves=grad_moves)
    dweight = dbias = None
    if a.weight is not None:
        dweight = _of_channels(sum_errors(rows, grad, moves, moves.terms.shape[1:]), a.weight.shape[0])
    if a.bias is not None:
        shape = moves.terms.shape[1:]
        sizes = of_gradients(absolute, rows) * grad.abs()
        sizes = (sizes if grad_moves is None else sizes + grad_moves).sum_to_size(shape)
        total = _of_channels(grad.sum_to_size(shape), a.bias.shape[0])
        dbias = _of_channels(sizes, a.bias.shape[0]) + drift(rows, a.bias.shape) * total.abs()
    return moves.rows.reshape(a.x.shape), dweight, dbias


def _by_channel(a: GroupNormArgs | GroupNormGradArgs, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias in float64, (groups, C / groups * ...); 1 and 0 where they are None."""
    wide = rows.double()
    weight, bias = (None if each is None else formulas.by_channel(each, wide, a.groups) for each in (a.weight, a.bias))
    return (
        torch.ones(()).double() if weight is None else weight,
        torch.zeros(()).double() if bias is None else bias,
    )


def _of_channels(by_element: Tensor, channels: int) -> Tensor:
    """Return the sum over the positions of each channel, (C,), of (groups, C / groups * ...)."""
    return by_element.reshape(channels, by_element.numel() // max(channels, 1)).sum(-1)

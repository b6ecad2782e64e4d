"""The formulas of group_norm and its gradients: the rows of LayerNorm are the groups of channels of one sample."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype
from fusedops.ops.gated.formulas import activated
from fusedops.ops.group_norm.arguments import SILU, GroupNormArgs, GroupNormGradArgs
from fusedops.ops.norms.formulas import gradients, mean_of, normalized, rstd_of


def rows_of(x: Tensor, groups: int) -> Tensor:
    """Return x (B, C, ...) as rows (B, groups, C / groups * ...): a view where x is contiguous."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups * prod(x.shape[2:]))


def by_channel(values: Tensor, like: Tensor, groups: int) -> Tensor:
    """Return one number for each channel, (C,), in the dtype and rows of ``like``: (groups, C / groups, positions)."""
    channels = values.shape[0]
    positions = like.shape[2] // max(channels // groups, 1)
    wide = values.to(like.dtype).view(groups, channels // groups, 1)
    return wide.expand(-1, -1, positions).reshape(groups, like.shape[2])


def group_norm(a: GroupNormArgs) -> Tensor:
    """Compute y, the shape and dtype of x, contiguous."""
    rows = rows_of(a.x, a.groups)
    z = affine(normalized(rows, rstd_of(rows, a.eps, True), mean_of(rows)), a.weight, a.bias, a.groups)
    return (activated(z, SILU)[0] if a.activation == SILU else z).to(a.x.dtype).view(a.x.shape)


def affine(normal: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int) -> Tensor:
    """Return ``normal * weight + bias``, (B, groups, C / groups * ...)."""
    z = normal if weight is None else normal * by_channel(weight, normal, groups)
    return z if bias is None else z + by_channel(bias, normal, groups)


def group_norm_gradients(a: GroupNormGradArgs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight and bias, each in its dtype."""
    wide = compute_dtype(a.x.dtype)
    rows, grad = rows_of(a.x, a.groups), rows_of(a.grad, a.groups).to(wide)
    if a.activation == SILU:
        z = affine(normalized(rows, a.rstd, a.mean), a.weight, a.bias, a.groups)
        grad = grad * activated(z, SILU)[1]
    weight, bias = (None if each is None else by_channel(each, grad, a.groups) for each in (a.weight, a.bias))
    drows, dweight, dbias = gradients(grad, rows, a.mean, a.rstd, weight, bias, 0.0, a.needs)
    return (
        None if drows is None else drows.to(a.x.dtype).reshape(a.x.shape),
        _summed(dweight, a.weight, a.groups),
        _summed(dbias, a.bias, a.groups),
    )


def _summed(by_element: Tensor | None, like: Tensor | None, groups: int) -> Tensor | None:
    """Return the sum over the positions of each channel, in the shape and dtype of a weight or bias."""
    if by_element is None or like is None:
        return None
    channels = like.shape[0]
    positions = by_element.shape[1] // max(channels // groups, 1)
    return by_element.view(channels, positions).sum(-1).to(like.dtype)


def empty(a: GroupNormArgs) -> Tensor:
    """Return an empty output: its dims in memory in the order of x's."""
    return torch.empty_like(a.x)

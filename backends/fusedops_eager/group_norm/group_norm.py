"""group_norm in plain torch, on any device: its formulas, in the memory order of x."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.ops import OPS
from fusedops.ops.group_norm.arguments import GroupNormArgs, GroupNormGradArgs

_OP = OPS["group_norm"]


def group_norm(a: GroupNormArgs, save: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the op on any device, for any rank, strides and dtypes."""
    y, *saved = _OP.reference_with_saved(*a, save)
    mean, rstd = saved
    return in_order_of(a.x, y), mean, rstd


def group_norm_backward(a: GroupNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weight and bias."""
    dx, dweight, dbias = _OP.backward(*a)
    return None if dx is None else in_order_of(a.x, dx), dweight, dbias


def in_order_of(x: Tensor, result: Tensor) -> Tensor:
    """Return a contiguous result with its dims in memory in the order of x's."""
    like = torch.empty_like(x)
    return result if like.stride() == result.stride() else like.copy_(result)

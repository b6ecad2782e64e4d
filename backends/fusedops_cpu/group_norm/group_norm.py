"""group_norm in the compiled library (``src/elementwise/group_norm.cpp``)."""

from __future__ import annotations

import math
from math import prod

import torch
from torch import Tensor

from fusedops import ops
from fusedops.ops.group_norm.arguments import GroupNormArgs, GroupNormGradArgs
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall

_CONSTRAINTS = any_dtype("x", "weight", "bias")
_SOURCE = "fusedops_cpu/src/elementwise/group_norm.cpp"


@library_kernel(ops.group_norm, *_CONSTRAINTS, source=_SOURCE, rows_independent=True)
def group_norm(a: GroupNormArgs, save: bool) -> LibraryCall | tuple[Tensor | None, ...]:
    """Compute the op; x contiguous or with channels next to each other, else of a contiguous copy."""
    by_channel = _has_channels_last(a.x)
    x = a.x if by_channel else dense(a.x)
    y = torch.empty_like(x)
    mean = x.new_empty((x.shape[0], a.groups), dtype=torch.float32) if save else None
    rstd = None if mean is None else torch.empty_like(mean)
    if not x.numel():  # a mean of no numbers
        return y, *(None if each is None else each.fill_(math.nan) for each in (mean, rstd))
    weight, bias = (each if each is None else dense(each) for each in (a.weight, a.bias))
    sizes = _sizes(x, a.groups, weight, bias, by_channel, a.activation)
    fields = (x, weight, bias, y, mean, rstd, *sizes, a.eps)
    return LibraryCall(library().group_norm_forward, fields, (y, mean, rstd))


@library_kernel(ops.group_norm, *_CONSTRAINTS, direction="backward", source=_SOURCE, rows_independent=True)
def group_norm_backward(a: GroupNormGradArgs) -> LibraryCall | tuple[Tensor | None, ...]:
    """Compute the gradients of x, weight and bias; sums do not depend on the number of threads."""
    by_channel = _has_channels_last(a.x)
    x = a.x if by_channel else dense(a.x)
    grad = _with_channels_last(a.grad) if by_channel else dense(a.grad)
    dx = torch.empty_like(x) if a.needs[0] else None
    weight, bias = (each if each is None else dense(each) for each in (a.weight, a.bias))
    dweight, dbias = (
        None if each is None or not need else torch.empty_like(each) for each, need in zip((weight, bias), a.needs[1:])
    )
    if not x.numel():
        return dx, *(None if each is None else each.zero_() for each in (dweight, dbias))
    sizes = _sizes(x, a.groups, weight, bias, by_channel, a.activation)
    tensors = (grad, x, weight, bias, dense(a.mean), dense(a.rstd), dx, dweight, dbias)
    return LibraryCall(library().group_norm_backward, (*tensors, *sizes), (dx, dweight, dbias))


def _has_channels_last(x: Tensor) -> bool:
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous() and not x.is_neg()


def _with_channels_last(x: Tensor) -> Tensor:
    return x if _has_channels_last(x) else dense(x.movedim(1, -1)).movedim(-1, 1)


def _sizes(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, by_channel: bool, activation: str
) -> tuple[int, ...]:
    """Return the fields of GroupNormSizes of ``src/api.h``."""
    dtypes = (0 if each is None else DTYPE_CODES[each.dtype] for each in (x, weight, bias))
    sizes = (x.shape[0], groups, x.shape[1] // groups, prod(x.shape[2:]))
    return (*dtypes, *sizes, int(by_channel), int(activation == "silu"))

"""causal_conv1d in the compiled library (``src/elementwise/causal_conv1d.cpp``).

x is read where it is if its positions are next to each other, or its channels, as in a (B, S, C) that is transposed.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops.ops.convolution.arguments import CausalConv1dArgs, CausalConv1dGradArgs, check_bounds, empty_state
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu.launch.calls import library_kernel, results_of
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall

_CONSTRAINTS = any_dtype("x", "weight", "bias")
_SOURCE = "fusedops_cpu/src/elementwise/causal_conv1d.cpp"


@library_kernel(
    ops.causal_conv1d,
    *_CONSTRAINTS,
    source=_SOURCE,
    rows_independent=True,
)
def causal_conv1d(a: CausalConv1dArgs) -> LibraryCall | tuple[Tensor, Tensor]:
    """Compute the op; x, weight and bias of any dtype of the library, any strides."""
    bounds = _bounds(a.cu_seqlens, a.x.shape[2])
    by_channel = _has_channels_together(a.x)
    y, state = _empty_like(a.x, by_channel), empty_state(a.x, a.weight, a.return_state, a.cu_seqlens)
    x = _with_steps(a.x, by_channel)
    own, offset, before = _beside(a.weight, a.bias, a.initial_state)
    sizes = _sizes(x, a.weight, a.bias, bounds, a.activation, by_channel, y)
    fields = (x, own, offset, before, bounds, y, state if a.return_state else None, *sizes)
    call = LibraryCall(library().conv_forward, fields, (y, state))
    return call if a.cu_seqlens is None else results_of(call)  # bounds are checked at each call: it is not remembered


@library_kernel(
    ops.causal_conv1d,
    *_CONSTRAINTS,
    direction="backward",
    source=_SOURCE,
    rows_independent=True,
)
def causal_conv1d_backward(a: CausalConv1dGradArgs) -> LibraryCall | tuple[Tensor | None, ...]:
    """Compute the gradients; the sums for weight and bias do not depend on the number of threads."""
    bounds = _bounds(a.cu_seqlens, a.x.shape[2])
    by_channel = _has_channels_together(a.x)
    dx = _empty_like(a.x, by_channel) if a.needs[0] else None
    results = tuple(
        torch.empty_like(each, memory_format=torch.contiguous_format) if each is not None and need else None
        for each, need in zip((a.weight, a.bias, a.initial_state), a.needs[1:])
    )
    x, grad_y = _with_steps(a.x, by_channel), _with_steps(a.grad_y, by_channel)
    own, offset, before = _beside(a.weight, a.bias, a.initial_state)
    sizes = _sizes(x, a.weight, a.bias, bounds, a.activation, by_channel, dx)
    of_state = dense(a.grad_state) if a.return_state else None
    fields = (grad_y, x, own, offset, before, bounds, of_state, dx, *results, *sizes, *grad_y.stride())
    call = LibraryCall(library().conv_backward, fields, (dx, *results))
    return call if a.cu_seqlens is None else results_of(call)


def _has_channels_together(x: Tensor) -> bool:
    """Return True where channels are next to each other in memory, and positions are not."""
    return x.shape[2] == 1 or (x.stride(2) != 1 and x.stride(1) == 1)


def _empty_like(x: Tensor, by_channel: bool) -> Tensor:
    """Return an empty result in the order of x in memory, its channels next to each other, else its positions."""
    result = torch.empty_like(x)
    if result.stride(1 if by_channel else 2) == 1:
        return result
    return torch.empty_like(x.mT, memory_format=torch.contiguous_format).mT if by_channel else x.new_empty(x.shape)


def _with_steps(x: Tensor, by_channel: bool) -> Tensor:
    """Return x, or a copy, with its channels next to each other, else its positions."""
    if x.stride(1 if by_channel else 2) == 1 and not x.is_neg():
        return x
    return dense(x.mT).mT if by_channel else dense(x)


def _bounds(cu_seqlens: Tensor | None, positions: int) -> Tensor | None:
    """Return the checked bounds of packed sequences, int64, in memory that no other thread writes."""
    bounds = check_bounds(cu_seqlens, positions)
    return None if bounds is None else torch.frombuffer(array("q", bounds), dtype=torch.int64)


def _beside(
    weight: Tensor, bias: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the other tensors without gaps."""
    offset, before = (None if each is None else dense(each) for each in (bias, initial_state))
    return dense(weight), offset, before


def _sizes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bounds: Tensor | None,
    activation: str,
    by_channel: bool,
    result: Tensor | None,
) -> tuple[int, ...]:
    """Return ``ConvSizes`` of ``src/api.h``."""
    dtypes = [0 if each is None else DTYPE_CODES[each.dtype] for each in (x, weight, bias)]
    sequences = x.shape[0] if bounds is None else bounds.shape[0] - 1
    options = (int(activation == "silu"), int(by_channel))
    strides: Any = (0, 0, 0) if result is None else result.stride()
    return (*dtypes, *x.shape, weight.shape[1], sequences, *options, *x.stride(), *strides)

"""The causal convolution in plain torch, on any device: a product and a sum for each tap.

Channels do not depend on each other: on a CPU a large call is computed for some channels at a time, whose numbers stay
in the cache between torch's calls. Packed sequences are one row, in which the input of a tap is masked where it is
another sequence's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusedops.dtypes import arithmetic
from fusedops.ops.convolution.arguments import CausalConv1dArgs, CausalConv1dGradArgs, check_bounds
from fusedops.ops.convolution.formulas import (
    SILU,
    Packed,
    final_state,
    linear_gradients,
    packed_of,
    taps,
)
from fusedops_eager._slabs import max_slab_elements

_aten = torch.ops.aten
# With fewer elements the tensor stays in the cache anyway, and slabs would only add calls
_MIN_SLAB_ELEMENTS = 256 * 1024
# torch allocates about so many tensors of a slab's size, in the compute dtype
_FORWARD_TENSORS, _BACKWARD_TENSORS = 2, 6


def causal_conv1d(a: CausalConv1dArgs) -> tuple[Tensor, Tensor]:
    """Compute the op on any device, for any strides and dtypes."""
    return forward(*a)


def causal_conv1d_backward(a: CausalConv1dGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weight, bias and initial_state."""
    of_state = a.grad_state if a.return_state else None
    return backward(a.grad_y, of_state, a.x, a.weight, a.bias, a.initial_state, a.cu_seqlens, a.activation, a.needs)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    initial_state: Tensor | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute y in the order of x in memory, and the state, (0,) where it is not wanted.

    Args:
        x: (B, C, S), floating, any strides.
        weight: (C, W), floating.
        bias: (C,), floating, or None.
        activation: "none" or "silu".
        initial_state: (B or N, C, W - 1), the dtype of x, or None.
        return_state: True where the state is wanted.
        cu_seqlens: (N + 1,), or None.
    """
    packed = _packed(cu_seqlens, x)
    wide, width = arithmetic(x, weight, bias), weight.shape[1]
    x, initial_state = x.resolve_neg(), None if initial_state is None else initial_state.resolve_neg()
    wide_weight, wide_bias = weight.to(wide), None if bias is None else bias.to(wide)
    y = torch.empty_like(x)
    for part in _channels(x, wide, _FORWARD_TENSORS):
        before = None if initial_state is None else initial_state[:, part].to(wide)
        inputs = taps(x[:, part].to(wide), width, before, packed)
        z = _sum(inputs, wide_weight[part], None if wide_bias is None else wide_bias[part])
        if activation == SILU:  # whose value at -inf is NaN in torch
            z = torch.nn.functional.silu(z.clamp_(min=torch.finfo(wide).min), inplace=True)
        y[:, part] = z if packed is None else z.masked_fill_(~packed.inside, 0.0)
    if not return_state:
        return y, x.new_empty(0)
    return y, final_state(_last(x, width, packed), width, initial_state, packed).contiguous()


def backward(
    grad_y: Tensor,
    grad_state: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weight, bias and initial_state, in their dtypes; None for one that is not wanted.

    Args:
        grad_y: (B, C, S), the gradient of y, floating, any strides.
        grad_state: the gradient of the state; None where it was not wanted.
        x: as in the forward.
        weight: as in the forward.
        bias: as in the forward.
        initial_state: as in the forward.
        cu_seqlens: as in the forward.
        activation: as in the forward.
        needs: the gradients to compute.
    """
    packed = _packed(cu_seqlens, x)
    wide, width = arithmetic(x, weight, bias), weight.shape[1]
    given = (grad_y, grad_state, x, initial_state)
    grad_y, grad_state, x, initial_state = (each if each is None else each.resolve_neg() for each in given)  # pyright: ignore
    wide_weight, wide_bias = weight.to(wide), None if bias is None else bias.to(wide)
    results = [
        torch.empty_like(each) if each is not None and need else None
        for each, need in zip((x, weight, bias, initial_state), needs)
    ]
    dx, dweight, dbias, dinitial = results
    for part in _channels(x, wide, _BACKWARD_TENSORS):
        before = None if initial_state is None else initial_state[:, part].to(wide)
        own = wide_weight[part]
        inputs, g = taps(x[:, part].to(wide), width, before, packed), grad_y[:, part].to(wide)
        if activation == SILU:  # whose slope at inf is NaN in torch
            z = _sum(inputs, own, None if wide_bias is None else wide_bias[part])
            g = _aten.silu_backward(g, z.clamp_(-torch.finfo(wide).max, torch.finfo(wide).max))
        of_state = None if grad_state is None else grad_state[:, part].to(wide)
        if packed is not None:
            g = g.masked_fill(~packed.inside, 0.0)
            found = linear_gradients(g, of_state, inputs, own, packed)
            for result, each in ((dx, found.x), (dinitial, found.initial_state)):
                if result is not None:
                    result[:, part] = each
            _put(dweight, part, found.weight)
            _put(dbias, part, found.bias)
            continue
        if dx is not None or dinitial is not None:
            whole = _transposed(g, of_state, own)
            if dx is not None:
                dx[:, part] = whole[..., width - 1 :]
            if dinitial is not None:
                dinitial[:, part] = whole[..., : width - 1]
        if dweight is not None:
            _put(dweight, part, torch.stack([(g * tap).sum((0, 2)) for tap in inputs], -1))
        if dbias is not None:
            _put(dbias, part, g.sum((0, 2)))
    return dx, dweight, dbias, dinitial


def _packed(cu_seqlens: Tensor | None, x: Tensor) -> Packed | None:
    check_bounds(cu_seqlens, x.shape[-1])
    return None if cu_seqlens is None else packed_of(cu_seqlens, x.shape[-1])


def _channels(x: Tensor, wide: torch.dtype, tensors: int) -> Iterator[slice]:
    """Yield the channels that are computed at a time: all of them off a CPU, and for a small call."""
    channels, step = x.shape[1], max(x.shape[1], 1)
    if x.is_cpu and x.numel() >= _MIN_SLAB_ELEMENTS:
        # sums have the same bits with any number of threads
        most = max_slab_elements(x.numel(), tensors * wide.itemsize // x.element_size(), 2)
        step = max(1, most * channels // x.numel())
    for start in range(0, channels, step):
        yield slice(start, start + step)


def _sum(inputs: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the sum of the taps and the bias, in memory of its own."""
    first, factors = inputs[0], [column[:, None] for column in weight.unbind(1)]
    total = first * factors[0] if bias is None else torch.addcmul(bias[:, None], first, factors[0])
    for tap, factor in zip(inputs[1:], factors[1:]):
        total.addcmul_(tap, factor)
    return total


def _transposed(g: Tensor, grad_state: Tensor | None, weight: Tensor) -> Tensor:
    """Return the gradient of the inputs before x, then of x, (B, C, W - 1 + S); g is that of the sum of the taps."""
    size, width = g.shape[-1], weight.shape[1]
    whole = g.new_zeros((*g.shape[:-1], width - 1 + size))
    if grad_state is not None:
        whole[..., size:] = grad_state
    for w in range(width):
        whole[..., w : w + size].addcmul_(g, weight[:, w, None])
    return whole


def _last(x: Tensor, width: int, packed: Packed | None) -> Tensor:
    """Return the positions of x that the state may have: of one sequence the last ones alone."""
    return x if packed is not None else x[..., max(x.shape[-1] - (width - 1), 0) :]


def _put(result: Tensor | None, part: slice, sums: Tensor) -> None:
    if result is not None:
        result[part] = sums

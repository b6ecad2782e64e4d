"""The causal convolution in plain torch, on any device: a product and a sum for each tap.

Packed sequences are one row, in which the input of a tap is masked where it is another sequence's.
"""

from __future__ import annotations

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

_aten = torch.ops.aten


def causal_conv1d(a: CausalConv1dArgs) -> tuple[Tensor, Tensor]:
    """Compute y in the order of x in memory, and the state, (0,) where it is not wanted; tensors of any strides."""
    packed, width = _packed(a.cu_seqlens, a.x), a.weight.shape[1]
    wide = arithmetic(a.x, a.weight, a.bias)
    x, initial_state = a.x.resolve_neg(), None if a.initial_state is None else a.initial_state.resolve_neg()
    inputs = taps(x.to(wide), width, None if initial_state is None else initial_state.to(wide), packed)
    z = _sum(inputs, a.weight.to(wide), None if a.bias is None else a.bias.to(wide))
    if a.activation == SILU:  # whose value at -inf is NaN in torch
        z = torch.nn.functional.silu(z.clamp_(min=torch.finfo(wide).min), inplace=True)
    y = torch.empty_like(x).copy_(z if packed is None else z.masked_fill_(~packed.inside, 0.0))
    if not a.return_state:
        return y, x.new_empty(0)
    return y, final_state(_last(x, width, packed), width, initial_state, packed).contiguous()


def causal_conv1d_backward(a: CausalConv1dGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weight, bias and initial_state, in their dtypes; None for one that is not wanted."""
    packed, width = _packed(a.cu_seqlens, a.x), a.weight.shape[1]
    wide = arithmetic(a.x, a.weight, a.bias)
    given = (a.grad_y, a.grad_state if a.return_state else None, a.x, a.initial_state)
    grad_y, grad_state, x, initial_state = (None if each is None else each.resolve_neg().to(wide) for each in given)
    assert grad_y is not None
    assert x is not None
    weight, bias = a.weight.to(wide), None if a.bias is None else a.bias.to(wide)
    results = [
        torch.empty_like(each) if each is not None and need else None
        for each, need in zip((a.x, a.weight, a.bias, a.initial_state), a.needs)
    ]
    dx, dweight, _, dinitial = results
    inputs, g = taps(x, width, initial_state, packed), grad_y
    if a.activation == SILU:  # whose slope at inf is NaN in torch
        z = _sum(inputs, weight, bias)
        g = _aten.silu_backward(g, z.clamp_(-torch.finfo(wide).max, torch.finfo(wide).max))
    if packed is not None:
        found = linear_gradients(g.masked_fill(~packed.inside, 0.0), grad_state, inputs, weight, packed)
        computed = (found.x, found.weight, found.bias, found.initial_state)
    else:
        whole = _transposed(g, grad_state, weight) if dx is not None or dinitial is not None else None
        computed = (
            None if whole is None else whole[..., width - 1 :],
            None if dweight is None else torch.stack([(g * tap).sum((0, 2)) for tap in inputs], -1),
            g.sum((0, 2)),
            None if whole is None else whole[..., : width - 1],
        )
    for result, each in zip(results, computed):
        if result is not None and each is not None:
            result.copy_(each)
    return (*results,)


def _packed(cu_seqlens: Tensor | None, x: Tensor) -> Packed | None:
    check_bounds(cu_seqlens, x.shape[-1])
    return None if cu_seqlens is None else packed_of(cu_seqlens, x.shape[-1])


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

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
    inputs = taps(x.to(wide), width, None if initial_state is None else initial_state.to(wide), packed)
    z = _sum(inputs, weight.to(wide), None if bias is None else bias.to(wide))
    if activation == SILU:  # whose value at -inf is NaN in torch
        z = torch.nn.functional.silu(z.clamp_(min=torch.finfo(wide).min), inplace=True)
    y = torch.empty_like(x).copy_(z if packed is None else z.masked_fill_(~packed.inside, 0.0))
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
    wide_weight = weight.to(wide)
    results = [
        torch.empty_like(each) if each is not None and need else None
        for each, need in zip((x, weight, bias, initial_state), needs)
    ]
    dx, dweight, dbias, dinitial = results
    inputs = taps(x.to(wide), width, None if initial_state is None else initial_state.to(wide), packed)
    g = grad_y.to(wide)
    if activation == SILU:  # whose slope at inf is NaN in torch
        z = _sum(inputs, wide_weight, None if bias is None else bias.to(wide))
        g = _aten.silu_backward(g, z.clamp_(-torch.finfo(wide).max, torch.finfo(wide).max))
    of_state = None if grad_state is None else grad_state.to(wide)
    if packed is not None:
        found = linear_gradients(g.masked_fill(~packed.inside, 0.0), of_state, inputs, wide_weight, packed)
        computed = (found.x, found.weight, found.bias, found.initial_state)
    else:
        whole = _transposed(g, of_state, wide_weight) if dx is not None or dinitial is not None else None
        computed = (
            None if whole is None else whole[..., width - 1 :],
            None if dweight is None else torch.stack([(g * tap).sum((0, 2)) for tap in inputs], -1),
            g.sum((0, 2)),
            None if whole is None else whole[..., : width - 1],
        )
    for result, each in zip(results, computed):
        if result is not None and each is not None:
            result.copy_(each)
    return dx, dweight, dbias, dinitial


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

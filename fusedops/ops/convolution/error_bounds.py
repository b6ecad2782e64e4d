"""The error bounds of causal_conv1d.

The sum of the taps is off by ``absolute`` times the sum of the magnitudes of its terms. silu changes that by its slope,
at most 1.1, and its slope by half of it. What is linear in the gradient is computed from magnitudes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops._contract.evidence import Tolerance, finite_size, tolerances
from fusedops.dtypes import arithmetic
from fusedops.ops.convolution.arguments import CausalConv1dArgs, CausalConv1dGradArgs
from fusedops.ops.convolution.formulas import (
    SILU,
    linear_gradients,
    packed_of,
    preactivation,
    taps,
)
from fusedops.ops.gated.error_bounds import gate_errors

TOLERANCE = tolerances((2e-6, 2e-6), (1e-14, 1e-12))  # absolute: of sums in float32
GRADIENT_TOLERANCE = {**TOLERANCE, torch.float32: Tolerance(4e-6, 4e-6), torch.float64: Tolerance(2e-14, 1e-12)}

_SLOPE, _BEND = 1.1, 0.5  # the largest first and second derivative of silu


class _Sum:
    """The sum of the taps in float64, and how far a kernel's may be from it.

    Attributes:
        inputs: the magnitudes of the input of each tap.
        weight: the magnitudes of the weight.
        packed: the sequences, or None.
        z: the sum, a number that is not finite as 0.
        moves: its error; inf where it may overflow.
    """

    def __init__(
        self,
        absolute: float,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        self.dtype = arithmetic(x, weight, bias)
        self.arithmetic = torch.finfo(self.dtype)
        # of tensors of float32 beside a result of float64 too
        self.absolute = absolute if self.dtype is torch.float64 else max(absolute, TOLERANCE[torch.float32].absolute)
        self.packed = None if cu_seqlens is None else packed_of(cu_seqlens, x.shape[-1])
        width = weight.shape[1]
        before = None if initial_state is None else _finite(initial_state)
        inputs = taps(_finite(x), width, before, self.packed)
        wide, offset = _finite(weight), None if bias is None else _finite(bias)
        self.z = preactivation(inputs, wide, offset)
        self.inputs = [each.abs() for each in inputs]
        self.weight = wide.abs()
        self.size = preactivation(self.inputs, self.weight, None if offset is None else offset.abs())
        least = 8 * self.arithmetic.tiny * self.arithmetic.eps  # the smallest numbers of the products
        self.moves = self.beyond(self.absolute * self.size + least)

    def beyond(self, error: Tensor) -> Tensor:
        """Return the error, inf where the sum may overflow."""
        return error.masked_fill(self.size >= self.arithmetic.max, math.inf)


def error_bound(absolute: float, a: CausalConv1dArgs) -> tuple[Tensor, Tensor]:
    """Return the largest errors of y and of the state, which has the inputs themselves."""
    total = _Sum(absolute, a.x, a.weight, a.bias, a.initial_state, a.cu_seqlens)
    moves = total.moves
    if a.activation == SILU:
        errors = gate_errors(total.absolute, total.z, SILU, total.arithmetic)
        moves = total.beyond(errors.act_moves + _SLOPE * moves.nan_to_num(posinf=0.0))
    return moves, torch.zeros(()).double()


def gradient_error_bound(absolute: float, a: CausalConv1dGradArgs) -> tuple[Tensor | None, ...]:
    """Return the same for the gradients of x, weight, bias and initial_state."""
    total = _Sum(absolute, a.x, a.weight, a.bias, a.initial_state, a.cu_seqlens)
    own, grad = total.absolute, finite_size(a.grad_y)
    g, moves = grad, own * grad
    if a.activation == SILU:
        errors = gate_errors(own, total.z, SILU, total.arithmetic)
        of_slope = errors.slope_moves + _BEND * total.moves.nan_to_num(posinf=0.0)
        moves = total.beyond(grad * (of_slope + 2 * own * errors.slope.abs()))
        g = grad * errors.slope.abs()
    if total.packed is not None:
        moves, g = (each.masked_fill(~total.packed.inside, 0.0) for each in (moves, g))
    of_state = finite_size(a.grad_state) if a.return_state else None
    # inf times 0 would be NaN
    unknown = moves.isinf()
    moves = moves.masked_fill(unknown, 0.0) + own * g
    size = linear_gradients(g, of_state, total.inputs, total.weight, total.packed)
    each = linear_gradients(moves, None, total.inputs, total.weight, total.packed)
    reached = linear_gradients(
        unknown.double(),
        None,
        [torch.ones_like(tap) for tap in total.inputs],
        torch.ones_like(total.weight),
        total.packed,
    )
    least = 8 * total.arithmetic.tiny * total.arithmetic.eps
    bounds: list[Tensor | None] = []
    for name, need in zip(size._fields, a.needs):
        error, magnitude = getattr(each, name), getattr(size, name)
        error = error + own * magnitude + least
        far = (magnitude >= total.arithmetic.max) | (getattr(reached, name) > 0)
        bounds.append(error.masked_fill(far, math.inf) if need else None)
    return tuple(bounds)


def _finite(x: Tensor) -> Tensor:
    return x.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

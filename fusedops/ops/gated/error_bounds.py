"""The error bounds of the gated activations.

swiglu: with ``r = abs(alpha * gate)``, an exponent that is off by a share of itself changes the sigmoid s by
``r * (1 - s)`` times that share. An s below the smallest normal number may be 0.

geglu: 1 + tanh and 1 + erf cancel below 0, and are constant beyond 10.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, promoted
from fusedops.ops.gated.formulas import activated, gradients, wide_pair


def swiglu_error_bound(
    absolute: float,
    gate: Tensor,
    up: Tensor | None,
    limit: float | None,
    alpha: float,
    offset: float,
    interleaved: bool,
) -> Tensor:
    """Return the largest error of the output; inf where a product may overflow."""
    g, u = _numbers(gate, up, limit, offset, interleaved)
    s, share, _ = _sigmoid(absolute, alpha, g)
    return _error(g.abs() * u, s * share, gate, up)


def swiglu_gradient_error_bound(
    absolute: float,
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    limit: float | None,
    alpha: float,
    offset: float,
    interleaved: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the same for the gradients of gate and up."""
    g, u = _numbers(gate, up, limit, offset, interleaved)
    s, share, rest = _sigmoid(absolute, alpha, g)
    d, r = _finite(grad.double()).abs(), (alpha * g).abs()
    slope = s * share + absolute * s * rest * r * (1 + r)  # of s + alpha * gate * s * (1 - s)
    # up * slope may be the first product
    dgate = _error(d * u * (1 + r), slope / (1 + r), gate, up, u * (1 + r))
    dup = _error(d * g.abs(), s * share, gate, up)
    return gradients(dgate, dup, gate.double(), None if up is None else up.double(), interleaved, needs)


def geglu_error_bound(absolute: float, gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool) -> Tensor:
    """Return the largest error of the output; inf where a product may overflow."""
    g, u = _saturated(gate, up, interleaved)
    return _error(g.abs() * u, _share(absolute, g), gate, up)


def geglu_gradient_error_bound(
    absolute: float,
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    approximate: str,
    interleaved: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the same for the gradients of gate and up."""
    g, u = _saturated(gate, up, interleaved)
    d = _finite(grad.double()).abs()
    slope = 0.06 + torch.exp(-0.25 * g.clamp(max=0.0).square())  # 0.06: where 1 - tanh**2 cancels
    dgate = _error(d * u, absolute * slope, gate, up, u * 1.13)  # up times the slope, at most 1.13, may come first
    dup = _error(d * g.abs(), _share(absolute, g), gate, up)
    return gradients(dgate, dup, gate.double(), None if up is None else up.double(), interleaved, needs)


class GateErrors(NamedTuple):
    """The activation of a gate and its derivative, in float64, each with the largest error."""

    act: Tensor
    act_moves: Tensor
    slope: Tensor
    slope_moves: Tensor


def gate_errors(absolute: float, gate: Tensor, activation: str, arithmetic: torch.finfo) -> GateErrors:
    """Return the activation with its errors; a gate that is not finite gives the same everywhere."""
    g = gate.double().nan_to_num(nan=0.0, posinf=1e3, neginf=-1e3)
    act, slope = activated(g, activation)
    r, s, rest = g.abs(), torch.sigmoid(g), torch.sigmoid(-g)
    share = absolute * (1 + r * rest)
    least = arithmetic.smallest_normal  # a sigmoid below it may be 0
    if activation == "sigmoid":
        return GateErrors(act, s * share + least, slope, s * rest * (share + absolute * (1 + r)) + absolute * s + least)
    slope_moves = s * share + absolute * s * rest * r * (1 + r) + (1 + r) * least
    return GateErrors(act, act.abs() * share + r * least, slope, slope_moves)


def _saturated(gate: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return gate, where an infinite one is 32, beyond which GELU does not change, and the size of up."""
    g, u = wide_pair(gate.double(), None if up is None else up.double(), interleaved)
    return g.nan_to_num(nan=0.0, posinf=32.0, neginf=-32.0), _finite(u).abs()


def _share(absolute: float, g: Tensor) -> Tensor:
    """Return the error of GELU in proportion to its argument."""
    return absolute * 10.0 / g.abs().clamp(min=10.0)


def _numbers(
    gate: Tensor, up: Tensor | None, limit: float | None, offset: float, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Return gate, and the size of ``up + offset``, clamped. An inf or NaN is 0 then: it gives the same everywhere."""
    g, u = wide_pair(gate.double(), None if up is None else up.double(), interleaved)
    bound = math.inf if limit is None else limit
    return _finite(g.clamp(max=bound)), _finite(u.clamp(-bound, bound)).abs() + abs(offset)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _sigmoid(absolute: float, alpha: float, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sigmoid, the share of it by which it may be off, and ``1 - sigmoid``."""
    exponent = alpha * g
    rest = torch.sigmoid(-exponent)
    return torch.sigmoid(exponent), absolute * (1 + exponent.abs() * rest), rest


def _error(size: Tensor, share: Tensor, gate: Tensor, up: Tensor | None, part: Tensor | None = None) -> Tensor:
    """Return a share of the size of a product; inf where it may overflow, or ``part``, a product of some factors."""
    arithmetic = torch.finfo(compute_dtype(promoted(gate, up)))
    least = torch.finfo(torch.float64).smallest_normal  # a product of float64 may be 0 in another order
    largest = size if part is None else torch.maximum(size, part)
    return (size * (share + arithmetic.smallest_normal) + least).masked_fill(largest >= arithmetic.max, math.inf)

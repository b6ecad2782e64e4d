"""The errors of the activation of a gate, in the bounds of what multiplies by one.

With ``r = abs(gate)``, an exponent that is off by a share of itself changes the sigmoid s by ``r * (1 - s)`` times that
share. An s below the smallest normal number may be 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops._contract.rounding import error_bound_of
from fusedops.ops.gated.formulas import activated, wide_pair


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


def gradient_error_bound_of(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the error bound of the gradients by their formula; inf where up times a slope may overflow first."""
    bound = error_bound_of(backward)

    def gradient_bound(absolute: float, grad: Tensor, gate: Tensor, up: Tensor | None, *options: Any) -> Any:
        dgate, dup = bound(absolute, grad, gate, up, *options)
        _, wide_up = wide_pair(gate, up, options[-2])
        overflows = wide_up.abs() > torch.finfo(wide_up.dtype).max / 2
        if dgate is not None and overflows.any():
            if up is None:
                none = torch.zeros_like(overflows)
                pair = (overflows, none)
                overflows = torch.stack(pair, -1).flatten(-2) if options[-2] else torch.cat(pair, -1)
            dgate = dgate.masked_fill(overflows, math.inf)
        return dgate, dup

    return gradient_bound

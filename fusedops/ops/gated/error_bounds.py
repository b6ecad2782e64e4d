"""The errors of the activation of a gate, in the bounds of what multiplies by one.

With ``r = abs(gate)``, an exponent that is off by a share of itself changes the sigmoid s by ``r * (1 - s)`` times that
share. An s below the smallest normal number may be 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.ops.gated.formulas import activated


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

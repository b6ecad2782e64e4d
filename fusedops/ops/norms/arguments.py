"""The constraints on the arguments of the norm ops."""

from __future__ import annotations

from fusedops._contract.constraint import Constraint
from fusedops.constraints import Count, Divisor, Finite, Flag, Floating, LastDims, OneOf, Rank, SameDevice, SameShape
from fusedops.ops.gated.formulas import ACTIVATIONS

X = (Floating("x"), Rank("x", at_least=1), Finite("eps", at_least=0.0))
RESIDUAL = (Floating("residual"), SameDevice("residual", "x"), SameShape("residual", "x"))
WEIGHT = (Floating("weight"), SameDevice("weight", "x"), LastDims("weight", "x"))
BIAS = (Floating("bias"), SameDevice("bias", "x"), LastDims("bias", "x"))
GATE: tuple[Constraint, ...] = (
    Floating("gate"),
    SameDevice("gate", "x"),
    SameShape("gate", "x"),
    Flag("gate_first"),
    OneOf("activation", *ACTIVATIONS),
    Count("groups", optional=False),
    Divisor("groups", "x"),
)

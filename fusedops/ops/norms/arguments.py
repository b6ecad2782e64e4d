"""The constraints on the arguments of the norm ops."""

from __future__ import annotations

from fusedops.constraints import Finite, Floating, LastDims, Rank, SameDevice, SameShape

X = (Floating("x"), Rank("x", at_least=1), Finite("eps", at_least=0.0))
RESIDUAL = (Floating("residual"), SameDevice("residual", "x"), SameShape("residual", "x"))
WEIGHT = (Floating("weight"), SameDevice("weight", "x"), LastDims("weight", "x"))
BIAS = (Floating("bias"), SameDevice("bias", "x"), LastDims("bias", "x"))

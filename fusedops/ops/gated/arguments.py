"""The constraints on the tensors of the gated activations."""

from __future__ import annotations

from fusedops._contract.constraint import Constraint
from fusedops.constraints import Flag, Floating, Packed, SameDevice, SameShape

TENSORS: tuple[Constraint, ...] = (
    Floating("gate"),
    Floating("up"),
    SameDevice("up", "gate"),
    SameShape("up", "gate"),
    Packed("gate", "up"),
    Flag("interleaved"),
)

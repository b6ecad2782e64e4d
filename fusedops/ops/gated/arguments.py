"""The constraints on the tensors of the gated activations."""

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

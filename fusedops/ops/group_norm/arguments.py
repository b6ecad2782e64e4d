"""The arguments of group_norm, and their constraints."""

from typing import Any

from torch import Tensor

from fusedops._contract.constraint import Constraint
from fusedops._named_tuple import NamedTuple
from fusedops.constraints import Count, Divisor, Finite, Floating, OneOf, Rank, SameDevice, SameSize

NONE, SILU = "none", "silu"
CONSTRAINTS: tuple[Constraint, ...] = (
    Floating("x"),
    Rank("x", 3, 4, 5),
    Count("groups", optional=False),
    Divisor("groups", "x", 1),
    Floating("weight"),
    SameDevice("weight", "x"),
    Rank("weight", 1),
    SameSize("weight", 0, "x", 1),
    Floating("bias"),
    SameDevice("bias", "x"),
    Rank("bias", 1),
    SameSize("bias", 0, "x", 1),
    Finite("eps", at_least=0.0),
    OneOf("activation", NONE, SILU),
)


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with ``activation`` as a text: None is "none"."""
    return (*args[:5], NONE) if args[5] is None else args


class GroupNormArgs(NamedTuple):
    """The arguments of group_norm."""

    x: Tensor
    groups: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    activation: str


class GroupNormGradArgs(NamedTuple):
    """The arguments of the backward of group_norm."""

    grad: Tensor
    x: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None
    groups: int
    activation: str
    needs: tuple[bool, ...]

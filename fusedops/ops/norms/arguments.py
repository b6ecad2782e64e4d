"""The constraints on the arguments of the norm ops."""

import torch
from torch import Tensor

from fusedops._contract.constraint import Constraint
from fusedops._named_tuple import NamedTuple
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


class GatedRmsNormArgs(NamedTuple):
    """The arguments of gated_rms_norm."""

    x: Tensor
    gate: Tensor
    weight: Tensor | None
    eps: float
    gate_first: bool
    activation: str
    groups: int
    offset: float


class GatedRmsNormGradArgs(NamedTuple):
    """The arguments of the backward of gated_rms_norm."""

    grad: Tensor
    x: Tensor
    gate: Tensor
    rstd: Tensor
    weight: Tensor | None
    gate_first: bool
    activation: str
    groups: int
    offset: float
    needs: tuple[bool, ...]


class AddLayerNormArgs(NamedTuple):
    """The arguments of add_layer_norm."""

    x: Tensor
    residual: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float


class AddLayerNormGradArgs(NamedTuple):
    """The arguments of the backward of add_layer_norm."""

    grad_y: Tensor
    grad_s: Tensor
    s: Tensor
    mean: Tensor
    rstd: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual_dtype: torch.dtype
    needs: tuple[bool, ...]


class AddRmsNormArgs(NamedTuple):
    """The arguments of add_rms_norm."""

    x: Tensor
    residual: Tensor
    weight: Tensor | None
    eps: float
    offset: float


class AddRmsNormGradArgs(NamedTuple):
    """The arguments of the backward of add_rms_norm."""

    grad_y: Tensor
    grad_s: Tensor
    s: Tensor
    rstd: Tensor
    weight: Tensor | None
    offset: float
    residual_dtype: torch.dtype
    needs: tuple[bool, ...]

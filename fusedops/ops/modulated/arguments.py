"""The arguments of the modulated norms and gated residuals, and their constraints."""

from typing import Any

from torch import Tensor

from fusedops._contract.constraint import Arguments, Constraint
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._named_tuple import NamedTuple
from fusedops.constraints import (
    Broadcasts,
    Finite,
    Floating,
    LastDims,
    OneOf,
    Rank,
    SameDevice,
    SameShape,
    SameSize,
)

LAYER, RMS = "layer", "rms"
NONE, TANH = "none", "tanh"


class _Width(SameSize):
    """The last size of what broadcasts: its whole shape follows that of the rows."""

    def follow(self, args: Arguments) -> TensorSpec | None:
        return None


def rows_of(name: str) -> tuple[Constraint, ...]:
    """Return the constraints on the tensor (B, S, H) that the others go with."""
    return (Floating(name), Rank(name, 3))


def beside(name: str, rows: str, *, one_column: bool = False) -> tuple[Constraint, ...]:
    """Return the constraints on a scale, shift or gate beside ``rows``; ``one_column``: also (B, S, 1)."""
    width = () if one_column else (_Width(name, -1, rows, -1),)
    return (Floating(name), SameDevice(name, rows), Rank(name, 1, 3), *width, Broadcasts(name, rows))


def modulation(rows: str) -> tuple[Constraint, ...]:
    """Return the constraints on the arguments of a modulated norm of ``rows`` but rows itself."""
    vectors = [(Floating(name), SameDevice(name, rows), LastDims(name, rows)) for name in ("weight", "bias")]
    return (
        *beside("scale", rows),
        *beside("shift", rows),
        *vectors[0],
        *vectors[1],
        Finite("eps", at_least=0.0),
        OneOf("kind", LAYER, RMS),
        Finite("offset"),
    )


def gated(rows: str) -> tuple[Constraint, ...]:
    """Return the constraints on the arguments of a gated sum with ``rows`` but rows itself."""
    return (
        Floating("y"),
        SameDevice("y", rows),
        SameShape("y", rows),
        *beside("gate", rows, one_column=True),
        OneOf("activation", NONE, TANH),
    )


def per_sample(tensor: Any) -> Any:
    """Return a scale, shift or gate (B, H) as a view (B, 1, H), anything else as it is."""
    if isinstance(tensor, TensorSpec):
        return tensor if tensor.dim() != 2 else tensor.replace(shape=(tensor.shape[0], 1, tensor.shape[1]))
    return tensor.unsqueeze(1) if isinstance(tensor, Tensor) and not tensor.is_nested and tensor.dim() == 2 else tensor


def named(activation: str | None) -> str:
    """Return the activation as a text: None is "none"."""
    return NONE if activation is None else activation


def prepared(args: tuple[Any, ...], repeated: tuple[int, ...], activation: int | None = None) -> tuple[Any, ...]:
    """Return the arguments with views of those that have a row for each sample, and the activation as a text.

    Args:
        args: of a call, in order; they are returned where nothing changes.
        repeated: the places of scale, shift and gate.
        activation: its place, or None.
    """
    changed = [per_sample(arg) if at in repeated else arg for at, arg in enumerate(args)]
    if activation is not None:
        changed[activation] = named(args[activation])
    return args if all(new is arg for new, arg in zip(changed, args)) else tuple(changed)


class ModulatedNormArgs(NamedTuple):
    """The arguments of modulated_norm."""

    x: Tensor
    scale: Tensor
    shift: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    kind: str
    offset: float


class ModulatedNormGradArgs(NamedTuple):
    """The arguments of the backward of modulated_norm."""

    grad: Tensor
    x: Tensor
    mean: Tensor
    rstd: Tensor
    scale: Tensor
    shift: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    kind: str
    offset: float
    needs: tuple[bool, ...]


class GatedAddModulatedNormArgs(NamedTuple):
    """The arguments of gated_add_modulated_norm."""

    residual: Tensor
    y: Tensor
    gate: Tensor
    scale: Tensor
    shift: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    kind: str
    offset: float
    activation: str


class GatedAddModulatedNormGradArgs(NamedTuple):
    """The arguments of the backward of gated_add_modulated_norm."""

    grad_z: Tensor
    grad_s: Tensor
    s: Tensor
    mean: Tensor
    rstd: Tensor
    y: Tensor
    gate: Tensor
    scale: Tensor
    shift: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    kind: str
    offset: float
    activation: str
    needs: tuple[bool, ...]

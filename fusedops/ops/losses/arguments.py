"""The arguments of the losses: each op's and its backward's, the constraints on them, the denominator, the targets."""

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.constraint import Constraint, shown
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._named_tuple import NamedTuple
from fusedops._storages import freed_error, is_freed
from fusedops._torch import dispatch_modes, is_traced, is_transformed
from fusedops.constraints import (
    Classes,
    Dim,
    Finite,
    Floating,
    Integer,
    LeadingDims,
    OneElement,
    OneOf,
    Present,
    Probability,
    Rank,
    SameDevice,
    SameSize,
    When,
)
from fusedops.constraints.dtypes import FLOATING
from fusedops.constraints.values import LARGEST, SYMBOLIC
from fusedops.dtypes import compute_dtype
from fusedops.errors import InvalidInputError

#: The smallest divisor: a smaller number is 0 on devices that flush.
_LEAST = torch.finfo(torch.float32).smallest_normal
_IGNORE_INDEX, _SOFTCAP = Integer("ignore_index"), Finite("softcap", at_least=_LEAST, optional=True)

#: The constraints on the arguments of a cross entropy that are no tensors.
OPTIONS: tuple[Constraint, ...] = (
    _IGNORE_INDEX,
    Probability("label_smoothing"),
    Finite("z_loss", at_least=0.0),
    _SOFTCAP,
    OneOf("reduction", "mean", "sum", "none"),
)
#: The same of log probabilities.
LOG_PROB_OPTIONS: tuple[Constraint, ...] = (Finite("temperature", at_least=_LEAST), _SOFTCAP, _IGNORE_INDEX)


class LossOptions(NamedTuple):
    """The options of a loss. The docstring of the op has their meaning.

    Attributes:
        ignore_index: the target of a row that does not count.
        label_smoothing: in [0, 1].
        z_loss: at least 0.
        softcap: above 0, or None.
        reduction: "mean", "sum" or "none".
        denominator: one element, what "mean" divides by, or None for the number of rows that count.
    """

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    reduction: str
    denominator: Tensor | None

    @property
    def of_sum(self) -> "LossOptions":
        """The same options of the sum of the losses."""
        return self._replace(reduction="sum", denominator=None)


_fields_of_options = attrgetter(*LossOptions._fields)


def _options(a: Any) -> LossOptions:
    """Return the options among arguments."""
    return LossOptions._make(_fields_of_options(a))


class CrossEntropyArgs(NamedTuple):
    """The arguments of cross_entropy."""

    logits: Tensor
    target: Tensor
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    reduction: str
    denominator: Tensor | None

    options = property(_options)


class CrossEntropyGradArgs(NamedTuple):
    """The arguments of the backward of cross_entropy."""

    grad: Tensor
    logits: Tensor
    log_prob: Tensor | None
    lse: Tensor
    target: Tensor
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    reduction: str
    denominator: Tensor | None

    options = property(_options)


class LinearCrossEntropyArgs(NamedTuple):
    """The arguments of linear_cross_entropy."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    reduction: str
    denominator: Tensor | None
    chunk: int | None

    options = property(_options)


class LinearCrossEntropyGradArgs(NamedTuple):
    """The arguments of the backward of linear_cross_entropy."""

    grad: Tensor
    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    x_grad: Tensor | None
    weight_grad: Tensor | None
    bias_grad: Tensor | None
    logits_grad: Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    reduction: str
    denominator: Tensor | None
    chunk: int | None
    reuse: bool
    needs: tuple[bool, ...]

    options = property(_options)


class LinearLogProbsArgs(NamedTuple):
    """The arguments of linear_log_probs."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    ignore_index: int
    return_entropy: bool


class LinearLogProbsGradArgs(NamedTuple):
    """The arguments of the backward of linear_log_probs."""

    grad_logp: Tensor
    grad_entropy: Tensor
    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    entropy: Tensor
    lse: Tensor
    temperature: float
    softcap: float | None
    ignore_index: int
    return_entropy: bool
    needs: tuple[bool, ...]


def target_constraints(first: str, classes_of: str | None = None, dim: int = -1) -> tuple[Constraint, ...]:
    """Return the constraints on target beside the parameter ``first``, which has a row for each."""
    return (
        Classes("target", classes_of, dim, ignored="ignore_index"),
        SameDevice("target", first),
        LeadingDims("target", first),
    )


def linear_constraints(*others: Constraint) -> tuple[Constraint, ...]:
    """Return the constraints on x, weight, target and bias, with others before those on bias."""
    return (
        Floating("x"),
        Rank("x", at_least=1),
        Floating("weight"),
        SameDevice("weight", "x"),
        Rank("weight", 2),
        Dim("weight", (0,), at_least=1),
        SameSize("weight", -1, "x", -1),
        *target_constraints("x", "weight", 0),
        *others,
        Floating("bias"),
        SameDevice("bias", "x"),
        Rank("bias", 1),
        SameSize("bias", 0, "weight", 0),
    )


def denominator_constraints(first: str) -> tuple[Constraint, ...]:
    """Return the constraints on denominator, which is on the device of the parameter ``first``."""
    none = Present("denominator", False, fix='pass reduction="mean", which divides by it')
    return (
        When(OneOf("reduction", "sum", "none"), none),
        OneElement("denominator", *FLOATING),
        SameDevice("denominator", first),
    )


def denominator_tensor(name: str, denominator: Any, first: Any) -> Any:
    """Return a denominator given as a number as a tensor of one element on the device of ``first``.

    Raises:
        InvalidInputError: it is neither a number that is finite in float32, nor a tensor, nor None.
    """
    if denominator is None or isinstance(denominator, (Tensor, TensorSpec)):
        return denominator
    number: Any = denominator
    if not isinstance(number, SYMBOLIC) and not (type(number) in (int, float) and abs(number) <= LARGEST):
        if hasattr(number, "tracer"):  # a value of torch.fx.symbolic_trace
            return denominator
        raise InvalidInputError(
            f"{name}: got denominator = {shown(number)}, expected a number, finite in float32, or a tensor of one "
            f"element; to fix: pass the number of targets that count"
        )
    if isinstance(first, TensorSpec):
        return TensorSpec((1,), compute_dtype(first.dtype), first.device)
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return denominator  # the op's check reports it; torch.fx records the number
    full: Any = torch.full  # whose stub knows no symbolic number
    number = float(number) if type(number) is int else number  # torch takes integers of 64 bits
    return full((1,), number, dtype=compute_dtype(first.dtype), device=first.device)


def check_targets(name: str, target: Tensor, ignore_index: int, classes: int) -> None:
    """Raise InvalidInputError for a target outside [0, classes) that is not ignored.

    A forward kernel that takes tensors on a CPU calls it, or raises the same. Only plain tensors on a CPU are read:
    on another device that would wait for it, and the loss of the row is NaN.

    Args:
        name: of the op, for the message.
        target: int64, any shape.
        ignore_index: the target of rows that are left out.
        classes: the number of classes.

    >>> import torch
    >>> from fusedops.ops.losses.arguments import check_targets
    >>> check_targets("cross_entropy", torch.tensor([0, 2, -100]), -100, 3)
    """
    if is_traced() or is_transformed():
        return
    if type(target) is not Tensor or not target.is_cpu or target.numel() == 0:
        return
    if dispatch_modes():
        return
    if is_freed(target):
        raise freed_error(name, "target")
    low, high = (int(bound) for bound in torch.aminmax(target))
    if low >= 0 and high < classes:
        return
    wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
    if wrong.numel():
        raise InvalidInputError(
            f"{name}: got target {int(wrong[0])}, expected one in [0, {classes}) or ignore_index = {ignore_index}; to "
            f"fix: pass the number that marks targets to leave out as ignore_index"
        )

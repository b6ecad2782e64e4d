"""The shared parts of the cross entropy ops: arguments, the loss of each row, its gradient, and the sum over rows.

A row is the last dim of the logits, (..., V); ``target`` (...) has its class. The arithmetic is float32, float64 for
float64. With ``z = softcap * tanh(logits / softcap)`` (the logits, without softcap) and ``lse = logsumexp(z)``, the
loss of a row is

    lse - (1 - label_smoothing) * z[target] - label_smoothing * mean(z) + z_loss * lse**2

It is 0 for a row whose target is ``ignore_index``, and NaN where the target is not in [0, V).
"""

from __future__ import annotations

import math
import sys
from sys import modules
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _is_tracing as jit_tracing,  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue,reportUnknownVariableType]
)
from torch.compiler import is_dynamo_compiling

from fusedops._contract.constraint import Constraint, shown
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._dispatch.autograd import transformed
from fusedops.constraints import (
    Classes,
    Finite,
    Integer,
    LeadingDims,
    OneElement,
    OneOf,
    Present,
    Probability,
    SameDevice,
    When,
)
from fusedops.constraints._dtypes import FLOATING
from fusedops.constraints._numbers import SYMBOLIC
from fusedops.errors import InvalidInputError

#: The smallest softcap: a smaller number is 0 on devices that flush.
_LEAST_CAP = torch.finfo(torch.float32).smallest_normal

#: The constraints on the arguments that are no tensors.
OPTIONS: tuple[Constraint, ...] = (
    Integer("ignore_index"),
    Probability("label_smoothing"),
    Finite("z_loss", at_least=0.0),
    Finite("softcap", at_least=_LEAST_CAP, optional=True),
    OneOf("reduction", "mean", "sum", "none"),
)


def tensor_constraints(first: str) -> tuple[Constraint, ...]:
    """Return the constraints on target and denominator beside the parameter ``first``, which has a row for each."""
    none = Present("denominator", False, fix='pass reduction="mean", which divides by it')
    return (
        Classes("target"),
        SameDevice("target", first),
        LeadingDims("target", first),
        When(OneOf("reduction", "sum", "none"), none),
        OneElement("denominator", *FLOATING),
        SameDevice("denominator", first),
    )


# ----------------------------------------------------------------------------------------------------------- arguments


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic and of the loss: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def denominator_tensor(name: str, denominator: Any, first: Any) -> Any:
    """Return a denominator given as a number as a tensor of one element on the device of ``first``.

    Raises:
        InvalidInputError: it is neither a finite number, nor a tensor, nor None.
    """
    if denominator is None or isinstance(denominator, (Tensor, TensorSpec)):
        return denominator
    number: Any = denominator
    if not isinstance(number, SYMBOLIC) and not (type(number) in (int, float) and abs(number) <= sys.float_info.max):
        if hasattr(number, "tracer"):  # a value of torch.fx.symbolic_trace
            return denominator
        raise InvalidInputError(
            f"{name}: got denominator = {shown(number)}, expected a finite number, or a tensor of one element; to "
            f"fix: pass the number of targets that count"
        )
    if isinstance(first, TensorSpec):
        return TensorSpec((1,), wide_dtype(first.dtype), first.device)
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return denominator  # the op's check reports it; torch.fx records the number
    full: Any = torch.full  # whose stub knows no symbolic number
    return full((1,), number, dtype=wide_dtype(first.dtype), device=first.device)


def check_targets(name: str, target: Tensor, ignore_index: int, classes: int) -> None:
    """Raise InvalidInputError for a target outside [0, classes) that is not ignored.

    Only plain tensors on a CPU are looked at: on another device that would wait for it. There the row is NaN.
    """
    if type(target) is not Tensor or not target.is_cpu or target.numel() == 0:
        return
    if is_dynamo_compiling() or jit_tracing() or transformed():
        return
    if torch._C._len_torch_dispatch_stack():  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue]
        return
    low, high = (int(bound) for bound in torch.aminmax(target))
    if low >= 0 and high < classes:
        return
    wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
    if wrong.numel():
        raise InvalidInputError(
            f"{name}: got target {int(wrong[0])}, expected one in [0, {classes}) or ignore_index = {ignore_index}; to "
            f"fix: pass the number that marks targets to leave out as ignore_index"
        )


def is_distributed(tensor: Any) -> bool:
    """Return True for a DTensor."""
    distributed = modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


# ----------------------------------------------------------------------------------------------------------- reference


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return z of the logits, in the dtype of the arithmetic."""
    z = logits.to(wide_dtype(logits.dtype))
    return z if softcap is None else torch.tanh(z / softcap) * softcap


def places(target: Tensor, ignore_index: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the class of each row, 0 where it has none; True for ignored rows; True for targets out of range."""
    ignored = target == ignore_index
    wrong = ((target < 0) | (target >= classes)) & ~ignored
    return target.masked_fill(ignored | wrong, 0), ignored, wrong


def logsumexp(z: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return lse of each row of z, 0 for an ignored row: (...)."""
    return torch.logsumexp(z, -1).masked_fill(target == ignore_index, 0.0)


def row_losses(z: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float) -> Tensor:
    """Return the loss of each row of z: (...), in the dtype of z."""
    classes, ignored, wrong = places(target, ignore_index, z.shape[-1])
    log_prob = torch.log_softmax(z.masked_fill(ignored[..., None], 0.0), -1)
    loss = -(1 - label_smoothing) * log_prob.gather(-1, classes[..., None])[..., 0]
    if label_smoothing != 0:  # of -inf, 0 times the mean is NaN
        loss = loss - label_smoothing * log_prob.mean(-1)
    if z_loss != 0:
        loss = loss + z_loss * logsumexp(z, target, ignore_index).square()
    return loss.masked_fill(ignored, 0.0).masked_fill(wrong, math.nan)


def divisor(target: Tensor, ignore_index: int, denominator: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return what "mean" divides by, of no dims: the denominator, or the number of rows that count, at least 1."""
    if denominator is not None:
        return denominator.to(dtype).reshape(())
    return (target != ignore_index).sum().clamp(min=1).to(dtype)


def reduced(loss: Tensor, target: Tensor, ignore_index: int, reduction: str, denominator: Tensor | None) -> Tensor:
    """Return the losses of rows (...) as they are for "none", or their sum or mean, of no dims."""
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / divisor(target, ignore_index, denominator, loss.dtype)


def row_scales(
    grad: Tensor, target: Tensor, ignore_index: int, classes: int, reduction: str, denominator: Tensor | None
) -> Tensor:
    """Return the gradient of the loss of each row: (...). 0 for an ignored row, NaN where the target is out of range.

    Args:
        grad: the gradient of the reduced loss: of no dims, or (...) for "none".
        target: (...).
        ignore_index: see the op.
        classes: V.
        reduction: see the op.
        denominator: see the op.
    """
    _, ignored, wrong = places(target, ignore_index, classes)
    if reduction == "mean":
        grad = grad / divisor(target, ignore_index, denominator, grad.dtype)
    return grad.expand(target.shape).masked_fill(ignored, 0.0).masked_fill(wrong, math.nan)


def logit_gradient(
    scale: Tensor, z: Tensor, lse: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> Tensor:
    """Return the gradient of z: ``scale * ((1 + 2 * z_loss * lse) * softmax(z) - smoothed one-hot)``: (..., V).

    Args:
        scale: (...), see :func:`row_scales`.
        z: (..., V), see :func:`capped`.
        lse: (...), logsumexp of z.
        target: (...).
        ignore_index: see the op.
        label_smoothing: see the op.
        z_loss: see the op.
    """
    classes, ignored, _ = places(target, ignore_index, z.shape[-1])
    probability = torch.exp(z.masked_fill(ignored[..., None], 0.0) - lse[..., None])
    if z_loss != 0:
        probability = probability * (1 + 2 * z_loss * lse)[..., None]
    hit = torch.arange(z.shape[-1], device=z.device) == classes[..., None]
    wanted = hit * (1 - label_smoothing) + label_smoothing / z.shape[-1]
    return (scale[..., None] * (probability - wanted)).masked_fill(ignored[..., None], 0.0)


def uncapped(dz: Tensor, z: Tensor, softcap: float | None) -> Tensor:
    """Return the gradient of the logits from that of z."""
    return dz if softcap is None else dz * (1 - (z / softcap).square())

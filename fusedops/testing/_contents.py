"""Contents of tensors besides random numbers: masks of any bytes, seeds of any bits, numbers that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.direction import Direction
from fusedops.testing._roles import added, log_sums, masks, rounded, seeds

NAN_CHOICE = "nan-choice"
"""The deviation of a kernel that chooses otherwise in rows with NaN."""


class Content(NamedTuple):
    """The elements of a tensor.

    Attributes:
        fill: returns a tensor of the same shape and dtype with it.
        hides: True where it may hide the effect of other arguments.
        excuse: the deviation that excuses a call with it, where the backend declares it.
    """

    fill: Callable[[Tensor], Tensor]
    hides: bool = False
    excuse: str = ""


def contents_of(op: Op, name: str, spec: TensorSpec, direction: Direction) -> dict[str, Content]:
    """Return the contents that an argument may have, by label."""
    if name in masks(op):
        return {
            f"{name} of bytes 2 to 255": Content(_any_bytes),
            f"{name} of True alone": Content(torch.ones_like, hides=True),
            f"{name} of False alone": Content(torch.zeros_like, hides=True),
        }
    if name in seeds(op):
        return {f"{name} = {value}": Content(_filled(value)) for value in (0, -5, 2**63 - 1)}
    if name in log_sums(op):
        return {
            f"{name} of empty sums alone": Content(_filled(-float("inf")), hides=True),
            f"{name} with empty sums": Content(_with_empty_sums),
            f"{name} of about 60": Content(_far_from_0),
        }
    small = {f"{name} of about 1e-6": Content(_small)} if name == op.parameters[0] and tiny(op, direction) else {}
    if name == op.parameters[0] and direction == "forward" and not masks(op):
        # under a mask a kernel may deviate, which the check "special" excuses where that is declared
        excuse = NAN_CHOICE if op.evidence.pin_choice else ""
        found = {f"{name} of NaN and inf": Content(_not_finite, hides=True, excuse=excuse)}
        if op.integers:  # a choice, which has ties then
            found[f"{name} of few numbers"] = Content(_few_numbers)
            found[f"{name} of one number"] = Content(torch.ones_like, hides=True)
        if name in rounded(op):
            found[f"{name} between whole numbers"] = Content(_halves)
        return {**found, **small}
    return small


def tiny(op: Op, direction: Direction) -> tuple[str, ...]:
    """Return the numbers, such as eps, that may be as small as the squares of small elements.

    None without an error bound: a tolerance alone is of numbers of about 1.
    """
    bound = op.evidence.error_bound if direction == "forward" else op.evidence.gradient_error_bound
    return () if bound is None else added(op)


def _any_bytes(mask: Tensor) -> Tensor:
    """Return the same mask with other bytes for True, which bool tensors that other libraries wrote have."""
    elements = torch.arange(mask.numel(), dtype=torch.uint8).view(mask.shape)
    spread = (elements % 127 * 2 + 2).to(mask.device)  # even: the lowest bit alone decides nothing
    masked = mask.view(torch.uint8) * spread
    return masked.view(mask.dtype)


def _filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def _with_empty_sums(tensor: Tensor) -> Tensor:
    filled = tensor.cpu().clone().reshape(-1)
    filled[::3] = -float("inf")  # the same places in each argument: of all of them, and of one beside others
    return filled.view(tensor.shape).to(tensor.device)


def _far_from_0(tensor: Tensor) -> Tensor:
    return tensor + 60


def _small(tensor: Tensor) -> Tensor:
    return tensor * 1e-6


def _few_numbers(tensor: Tensor) -> Tensor:
    return tensor.round().clamp(-2, 2)


def _halves(tensor: Tensor) -> Tensor:
    # a row of them has the scale 1
    halves = (tensor * 4).round().clamp(-120, 120) + 0.5 if tensor.is_floating_point() else tensor.clone()
    halves[..., :1] = 127
    return halves


def _not_finite(tensor: Tensor) -> Tensor:
    # finite elements are small: a factor that is rounded to 0 makes NaN of an infinity beside it
    flat = tensor.cpu().reshape(-1).clamp(-4, 4)
    for at, value in enumerate((float("inf"), float("nan"), -float("inf"))):
        flat[at * 7 + 1 :: 29] = value
    return flat.view(tensor.shape).to(tensor.device)

"""Checks of the arguments of the losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops.errors import InvalidInputError


def check_choice(loss: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise InvalidInputError where a text is none of the choices."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise InvalidInputError(f"{loss}: got {name} = {value!r}, expected one of {listed}; to fix: pass one of these")


def check_shapes(loss: str, shapes: tuple[tuple[int, ...], ...], of: str, **tensors: Any) -> None:
    """Raise InvalidInputError where a tensor is present and has none of the shapes."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            got = type(tensor).__name__
            raise InvalidInputError(f"{loss}: got {name} of type {got}, expected a tensor; to fix: pass a tensor")
        if tuple(tensor.shape) not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise InvalidInputError(
                f"{loss}: got {name} of shape {tuple(tensor.shape)}, expected {wanted}, {of}; to fix: pass {name} of "
                f"this shape"
            )


def check_present(loss: str, reason: str, **tensors: Any) -> None:
    """Raise InvalidInputError where an argument is None."""
    for name, value in tensors.items():
        if value is None:
            raise InvalidInputError(f"{loss}: got {name} = None, expected a value, {reason}; to fix: pass {name}")


def check_number(loss: str, name: str, value: float, low: float, high: float, *, low_allowed: bool = True) -> None:
    """Raise InvalidInputError where a number is outside [low, high), or (low, high) without ``low_allowed``."""
    if not (low < value < high or (low_allowed and value == low)):
        bracket = "[" if low_allowed else "("
        raise InvalidInputError(
            f"{loss}: got {name} = {value}, expected a number in {bracket}{low:g}, {high:g}); to fix: pass one"
        )

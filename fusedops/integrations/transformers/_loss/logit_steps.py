"""The functions after which deferred logits stay deferred: views and casts, a scale, a bias, a tanh."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops._torch import TENSOR_TYPES

_aten: Any = torch.ops.aten


class Step(NamedTuple):
    """A function that was called on logits.

    Attributes:
        call: the function on the logits alone.
        view: True where it returns a view.
        rows: what it does to the rows, on x; None where it keeps them.
        name: what it does to the numbers: "mul", "add", "tanh", or "".
        value: what they are multiplied by, or the bias.
    """

    call: Callable[[Tensor], Tensor]
    view: bool = False
    rows: Callable[[Tensor], Tensor] | None = None
    name: str = ""
    value: Any = None


def step_after(like: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
    """Return what a call of a function of torch does to logits (..., V), or None where it makes them.

    Args:
        like: a tensor of the shape and dtype of the logits.
        func: an overload of a function of torch.
        args: its arguments after the logits.
        kwargs: its arguments by keyword, without a device.

    >>> step_after(torch.ones(2, 3), torch.ops.aten.mul.Tensor, (2,), {}).value
    2.0
    """
    step_of = _STEPS.get(func)
    return None if step_of is None else step_of(like, func, *args, **kwargs)


def readings(steps: tuple[Step, ...], bias: Tensor | None) -> tuple[float, Tensor | None, float | None] | None:
    """Return s, b and c of ``c * tanh((s * x @ weight.T + b) / c)``, c None without tanh, or None for another."""
    scale, capped, tanhs = 1.0, 1.0, 0
    for step in steps:
        if step.name == "tanh" or (step.name == "add" and tanhs):
            tanhs += 1
        elif step.name == "add":
            value = step.value.reshape(-1)
            bias = value if bias is None else bias + value
        elif step.name == "mul" and tanhs:
            capped *= step.value
        elif step.name == "mul":
            scale, bias = scale * step.value, None if bias is None else bias * step.value
    if not math.isfinite(scale) or not math.isfinite(scale * capped) or tanhs > 1 or capped <= 0:
        return None
    if tanhs == 0:
        return scale, bias, None
    return scale * capped, None if bias is None else bias * capped, capped


def _viewed(like: Tensor, func: Any) -> Step:
    return Step(func, view=True)


def _cut(like: Tensor, func: Any, dim: int = 0, *index: Any) -> Step | None:
    """Take a slice or one index of another dim than the classes'."""
    number = dim % like.dim()

    def call(x: Tensor) -> Tensor:
        return func(x, number, *index)

    return None if number == like.dim() - 1 else Step(call, view=True, rows=call)


def _reshaped(like: Tensor, func: Any, size: list[int]) -> Step | None:
    """Take a shape that keeps the dim of the classes."""
    if not size or size[-1] not in (like.shape[-1], -1):
        return None

    def call(y: Tensor) -> Tensor:
        return func(y, size)

    def rows(x: Tensor) -> Tensor:
        return x.reshape(*size[:-1], x.shape[-1])

    return Step(call, func is _aten.view.default, rows)


def _chosen(like: Tensor, func: Any, indices: list[Any]) -> Step | None:
    """Take one mask of rows."""
    mask = indices[0]
    if len(indices) != 1 or type(mask) is not Tensor or mask.dtype != torch.bool or not 0 < mask.dim() < like.dim():
        return None
    if mask.shape != like.shape[: mask.dim()]:
        return None
    chosen = mask.nonzero(as_tuple=True)

    def call(x: Tensor) -> Tensor:
        return x[tuple(index.to(x.device) for index in chosen)]

    return Step(call, rows=call)


def _copied(like: Tensor, func: Any, **kwargs: Any) -> Step | None:
    """Take a cast to a floating dtype, or a copy."""
    dtype = kwargs.get("dtype", like.dtype)
    if not dtype.is_floating_point or not kwargs.keys() <= {"dtype", "memory_format", "non_blocking"}:
        return None
    return Step(partial(func, **kwargs))


def _scaled(like: Tensor, func: Any, other: Any) -> Step | None:
    """Take a number."""
    if not isinstance(other, (int, float)) or isinstance(other, bool) or other == 0:
        return None
    factor = 1 / other if func is _aten.div.Tensor else float(other)

    def call(y: Tensor) -> Tensor:
        return func(y, other)

    return Step(call, name="mul", value=factor)


def _added(like: Tensor, func: Any, other: Any, *, alpha: float = 1) -> Step | None:
    """Take a bias: one number for each class."""
    if type(other) not in TENSOR_TYPES or alpha != 1 or other.shape[-1:] != like.shape[-1:] or other.is_inference():
        return None
    if other.numel() != like.shape[-1] or other.dim() > like.dim() or other.dtype != like.dtype:
        return None

    def call(y: Tensor) -> Tensor:
        return func(y, other.to(y.device))

    return Step(call, name="add", value=other)


def _limited(like: Tensor, func: Any) -> Step:
    return Step(func, name="tanh")


_STEPS: dict[Any, Callable[..., Step | None]] = {
    _aten.alias.default: _viewed,
    _aten.detach.default: _viewed,
    _aten.slice.Tensor: _cut,
    _aten.select.int: _cut,
    _aten.view.default: _reshaped,
    _aten._unsafe_view.default: _reshaped,
    _aten.index.Tensor: _chosen,
    _aten.clone.default: _copied,
    _aten._to_copy.default: _copied,
    _aten.mul.Tensor: _scaled,
    _aten.div.Tensor: _scaled,
    _aten.add.Tensor: _added,
    _aten.tanh.default: _limited,
}

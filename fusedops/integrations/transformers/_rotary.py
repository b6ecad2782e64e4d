"""Rotary embeddings in models, recognised by their results.

transformers' attention modules call a function of their file, ``apply_rotary_pos_emb``, by its name. A replaced module
runs a copy of its forward in which this name is the op; the file, and with it every other model, stays as it is.

The function takes cos and sin with each entry twice, which the op takes once. So it is replaced only where the model's
own rotary modules are seen to give each entry twice, in the order that the function expects.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any, cast

from torch.nn import Module

from fusedops.integrations.transformers._replacement import Replacement, own_body, own_class
from fusedops.integrations.transformers._rotary_functions import RotaryFunction, recognised_function
from fusedops.integrations.transformers._rotary_layouts import Layout
from fusedops.integrations.transformers._twin import (
    is_replaced_elsewhere,
)


@dataclass(frozen=True)
class Rotary(Replacement):
    """The settings of a replaced attention module: the functions in place of those that its forward names."""

    op: str
    original: type[Module]
    functions: tuple[tuple[str, RotaryFunction], ...]
    copied: Callable[..., Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        forward = self.original.forward
        own = cast("FunctionType", inspect.unwrap(forward))
        names = dict(own.__globals__)
        for name, function in self.functions:
            names[name] = _op_or_own(function, names[name])
        # torch.compile would look names up in the module of this name, and find the function that is replaced
        del names["__name__"]
        # torch.compile keeps compiled frames by code object, and their functions in the globals of the frame: functions
        # that share a code object must share their globals, so the copy has a code object of its own
        copied = FunctionType(own.__code__.replace(), names, own.__name__, own.__defaults__, own.__closure__)
        copied.__kwdefaults__ = own.__kwdefaults__
        object.__setattr__(self, "copied", _decorated(forward, own, copied))

    def __reduce__(self) -> Any:
        return Rotary, (self.op, self.original, self.functions)

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the copy of the module's forward."""
        return self.copied(module, *args, **kwargs)


def _decorated(function: Any, body: Any, changed: Any) -> Any:
    """Return a function with another body below its decorators, or None where one of them holds it out of reach.

    A decorator made with functools.wraps holds what it decorates in its closure.
    """
    if function is body:
        return changed
    inner = function.__wrapped__
    below = _decorated(inner, body, changed)
    cells = [_contents(cell) is inner for cell in function.__closure__ or ()]
    if below is None or True not in cells or not isinstance(function, FunctionType):
        return None
    closure = tuple(CellType(below) if held else cell for held, cell in zip(cells, function.__closure__ or ()))
    copied = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update({**vars(function), "__wrapped__": below})
    return copied


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _op_or_own(function: RotaryFunction, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the op, with the model's own function for other calls than those that were compared."""

    def rotated(*args: Any, **kwargs: Any) -> Any:
        return function(own, *args, **kwargs)

    return rotated


def recognised_rotary(module: Module, layouts: Mapping[str, set[Layout | None]]) -> Rotary | str | None:
    """Return the replacement of an attention module, the reason why one is left, or None for another module.

    Args:
        module: any.
        layouts: of the model, from layouts_of.

    >>> import torch
    >>> recognised_rotary(torch.nn.Linear(2, 2), {})
    """
    cls = own_class(module)
    own: Any = own_body(module)
    if not isinstance(own, FunctionType):
        return None
    rotary = {name: own.__globals__.get(name) for name in own.__code__.co_names if "rotary" in name}
    rotary = {name: function for name, function in rotary.items() if callable(function)}
    if not rotary:
        return None
    if is_replaced_elsewhere(module):
        return "another library has replaced its forward"
    if _decorated(cls.forward, own, own) is None:
        return "a decorator of its forward keeps it where it cannot be replaced"
    known = layouts.get(cls.__module__, set())
    functions: list[tuple[str, RotaryFunction]] = []
    for name, function in rotary.items():
        if isinstance(function, Module) and is_replaced_elsewhere(function):
            return f"another library has replaced {name}"
        recognised = recognised_function(name, function)
        if isinstance(recognised, str):
            return recognised if len(rotary) == 1 else f"its forward may call several functions, and {recognised}"
        layout = recognised.rotation.layout
        if layout in ("halves", "pairs") and known != {layout}:
            return f"the model has no rotary module that gives cos as {name} takes it"
        functions.append((name, recognised))
    return Rotary("rotary_embedding", cls, tuple(functions))

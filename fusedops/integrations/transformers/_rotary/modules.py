"""Rotary embeddings in models, recognised by their results.

transformers' attention modules call a function of their file, ``apply_rotary_pos_emb``, by its name. A replaced module
runs a copy of its forward in which this name is the op.

The function takes cos and sin with each entry twice, which the op takes once. So it is replaced only where the model's
own rotary modules are seen to give each entry twice, in the order that the function expects.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, cast

from torch.nn import Module

from fusedops.integrations._replacement import Replacement, own_body, own_class
from fusedops.integrations._trial.copied import copied, reason_not_to_copy
from fusedops.integrations._trial.twin import is_changed, is_replaced_elsewhere
from fusedops.integrations.transformers._rotary.functions import RotaryFunction, recognised_function
from fusedops.integrations.transformers._rotary.layouts import Layout


@dataclass(frozen=True)
class Rotary(Replacement):
    """The settings of a replaced attention module: the functions in place of those that its forward names."""

    op: str
    original: type[Module]
    functions: tuple[tuple[str, RotaryFunction], ...]
    copied: Callable[..., Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        functions = functions_of(self.original, self.functions)
        object.__setattr__(self, "copied", copied(self.original.forward, functions))

    def __reduce__(self) -> Any:
        return Rotary, (self.op, self.original, self.functions)

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the copy of the module's forward."""
        return self.copied(module, *args, **kwargs)


def functions_of(
    original: type[Module], functions: tuple[tuple[str, RotaryFunction], ...]
) -> dict[str, Callable[..., Any]]:
    """Return what a copy of a module's forward calls in place of its rotary functions, by name."""
    own = cast("FunctionType", inspect.unwrap(original.forward)).__globals__
    return {name: _op_or_own(function, own[name]) for name, function in functions}


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
    reason = reason_not_to_copy(cls.forward)
    if reason is not None:
        return reason
    known = layouts.get(cls.__module__, set())
    functions: list[tuple[str, RotaryFunction]] = []
    for name, function in rotary.items():
        if is_changed(function):
            return f"another library has replaced {name}, or it has hooks"
        recognised = recognised_function(function, name)
        if isinstance(recognised, str):
            return recognised if len(rotary) == 1 else f"its forward may call several functions, and {recognised}"
        layout = recognised.rotation.layout
        if layout in ("halves", "pairs") and known != {layout}:
            return f"the model has no rotary module that gives cos as {name} takes it"
        functions.append((name, recognised))
    return Rotary("rotary_embedding", cls, tuple(functions))

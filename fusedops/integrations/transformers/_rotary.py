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
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops.dtypes import promoted
from fusedops.integrations.transformers._replacement import Replacement, own_class
from fusedops.integrations.transformers._rotary_layouts import Layout, once
from fusedops.integrations.transformers._twin import (
    called,
    is_replaced_elsewhere,
    near,
    numbers,
    pair_of,
)

_LAYOUTS: tuple[Layout, ...] = ("halves", "pairs", "once")
_PARAMETERS = (["q", "k", "cos", "sin"], ["q", "k", "cos", "sin", "unsqueeze_dim"])
_TOLERANCE = 1e-5
_NARROW = 2.0**-5  # of bfloat16: products and sums are rounded, cos is too


@dataclass(frozen=True)
class RotaryFunction:
    """The op with the parameters of transformers' function."""

    interleaved: bool
    layout: Layout
    promotes: bool  # the results have the wider dtype of q and cos, not that of q

    def fits(self, q: Tensor, cos: Tensor, unsqueeze_dim: int = 1) -> bool:
        """Return True for the ranks that were compared: heads of 4 dims, cos of 3."""
        return q.dim() == 4 and cos.dim() == 3 and unsqueeze_dim in (1, 2)

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
        """Return q and k, rotated."""
        if self.promotes and cos.dtype != q.dtype:
            wide = promoted(q, cos)
            q, k = q.to(wide), k.to(wide)
        seq_dim = -2 if unsqueeze_dim == 1 else -3
        angles = once(cos, self.layout), once(sin, self.layout)
        return ops.rotary_embedding(q, k, *angles, interleaved=self.interleaved, seq_dim=seq_dim)


@dataclass(frozen=True)
class Rotary(Replacement):
    """The settings of a replaced attention module: the functions in place of those that its forward names."""

    op: str
    original: type[Module]
    functions: tuple[tuple[str, RotaryFunction], ...]
    copied: Callable[..., Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        own = cast("FunctionType", self.original.forward)
        names = dict(own.__globals__)
        for name, function in self.functions:
            names[name] = _op_or_own(function, names[name])
        # torch.compile would look names up in the module of this name, and find the function that is replaced
        del names["__name__"]
        # torch.compile keeps compiled frames by code object, and their functions in the globals of the frame: functions
        # that share a code object must share their globals, so the copy has a code object of its own
        copied = FunctionType(own.__code__.replace(), names, own.__name__, own.__defaults__, own.__closure__)
        copied.__kwdefaults__ = own.__kwdefaults__
        object.__setattr__(self, "copied", copied)

    def __reduce__(self) -> Any:
        return Rotary, (self.op, self.original, self.functions)

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the copy of the module's forward."""
        return self.copied(module, *args, **kwargs)


def _op_or_own(function: RotaryFunction, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the op, with the model's own function for calls of other ranks than those that were compared."""

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if function.fits(q, cos, *args, **kwargs):
            return function(q, k, cos, sin, *args, **kwargs)
        return own(q, k, cos, sin, *args, **kwargs)

    return rotated


def recognised_rotary(module: Module, layouts: Mapping[str, set[Layout | None]]) -> Rotary | str | None:
    """Return the replacement of an attention module, the reason why one is left, or None for another module.

    Args:
        module: any.
        layouts: of the model, from layouts_of.

    >>> recognised_rotary(torch.nn.Linear(2, 2), {})
    """
    cls = own_class(module)
    own: Any = cls.forward
    if not isinstance(own, FunctionType):
        return None
    rotary = {name: own.__globals__.get(name) for name in own.__code__.co_names if "rotary" in name}
    rotary = {name: function for name, function in rotary.items() if callable(function)}
    if not rotary:
        return None
    if is_replaced_elsewhere(module):
        return "another library has replaced its forward"
    known = layouts.get(cls.__module__, set())
    functions: list[tuple[str, RotaryFunction]] = []
    for name, function in rotary.items():
        if isinstance(function, Module) and is_replaced_elsewhere(function):
            return f"another library has replaced {name}"
        recognised = recognised_function(name, function)
        if isinstance(recognised, str):
            return recognised if len(rotary) == 1 else f"its forward may call several functions, and {recognised}"
        if known != {recognised.layout}:
            return f"the model has no rotary module that gives cos as {name} takes it"
        functions.append((name, recognised))
    return Rotary("rotary_embedding", cls, tuple(functions))


def recognised_function(name: str, function: Any) -> RotaryFunction | str:
    """Return the op in the place of a function, or the reason why it is none."""
    own = partial(type(function).forward, function) if isinstance(function, Module) else function
    parameters = list(inspect.signature(own).parameters)
    if parameters not in _PARAMETERS:
        return f"{name} takes {', '.join(parameters)}, expected q, k, cos, sin"
    dims = (1, 2) if "unsqueeze_dim" in parameters else (1,)
    for layout in _LAYOUTS:
        for interleaved in (False, True):
            found = RotaryFunction(interleaved, layout, False)
            if all(_has_values_of(found, own, dim) for dim in dims):
                return _with_dtype(found, own) or f"the dtypes of the results of {name} follow another rule"
    return f"the results of {name} are not those of rotary_embedding"


def _angles(layout: Layout, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return random cos and sin of a rotary part of a size. They lie on no circle: a rotation is linear in them."""
    cos, sin = numbers(5, 2, 5, size // 2, dtype=dtype), numbers(6, 2, 5, size // 2, dtype=dtype)
    if layout == "once":
        return cos, sin
    if layout == "pairs":
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def _agree(found: RotaryFunction, own: Any, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor], dim: int) -> Any:
    """Return the function's results where they agree with the op's, False where not, None where it raises."""
    extra = () if dim == 1 else (dim,)
    results = called(own, q.clone(), k.clone(), *(each.clone() for each in angles), *extra)
    pair = pair_of(results)
    if pair is None:
        return None
    halved = [once(each, found.layout) for each in angles]
    expected = ops.OPS["rotary_embedding"].reference(q, k, *halved, found.interleaved, -2 if dim == 1 else -3)
    tolerance = _TOLERANCE if q.dtype == torch.float32 else _NARROW
    return pair if all(near(*each, tolerance) for each in zip(pair, expected)) else False


def _heads(dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q, k = numbers(1, 2, 3, 5, 16, dtype=dtype), numbers(2, 2, 1, 5, 16, dtype=dtype)
    return (q, k) if dim == 1 else (q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous())


def _has_values_of(found: RotaryFunction, own: Any, dim: int) -> bool:
    """Return True where the function agrees on whole heads and, unless it raises, on parts of heads."""
    q, k = _heads(dim, torch.float32)
    whole = _agree(found, own, q, k, _angles(found.layout, 16), dim)
    return bool(whole) and _agree(found, own, q, k, _angles(found.layout, 8), dim) is not False


def _with_dtype(found: RotaryFunction, own: Any) -> RotaryFunction | None:
    """Return the function with the rule for the dtype of its results, or None where it has another."""
    q, k = _heads(1, torch.bfloat16)
    same = _agree(found, own, q, k, _angles(found.layout, 16, torch.bfloat16), 1)
    mixed = _agree(found, own, q, k, _angles(found.layout, 16), 1)
    if not same or same[0].dtype != torch.bfloat16 or not mixed:
        return None
    return RotaryFunction(found.interleaved, found.layout, mixed[0].dtype == torch.float32)

"""Gated MLPs in models (Llama's, Gemma's, Phi-3's, T5's), recognised by their results.

A gated MLP has two linear layers, or one of twice the width, before the activation and one after it. Which is which,
and which activation it is, follows from the results: the MLP's own forward runs with small random layers in place of
its own, and is compared with each possible reading. The layers themselves are called as they are, so they may be
adapters, quantized or sharded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations, product
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Dropout, Linear, Module, Parameter

from fusedops import ops
from fusedops.integrations._recomputed import call_without_keeping
from fusedops.integrations._replacement import Replacement, own_class
from fusedops.integrations._trial.source import reason_of_source
from fusedops.integrations._trial.twin import (
    Raised,
    called,
    hooked,
    is_replaced_elsewhere,
    near,
    numbers,
    parameters_of,
    twin,
    without_hooks,
)
from fusedops.integrations._trial.whole import TOKENS, seen_whole

Packed = Literal["gate first", "up first", "interleaved"]

_IN, _INNER, _OUT = 8, 12, 10  # sizes of the small layers
_TOLERANCE = 1e-6  # of float64; GELU by tanh differs from GELU by erf by 5e-4
_NARROW = 2.0**-5  # of bfloat16, with a rounding of each function
_NAMES = ("mlp", "feedforward", "ffn", "gated", "glu", "denseact")


@dataclass(frozen=True)
class Gated(Replacement):
    """The settings of a replaced MLP: the names of its layers and the activation."""

    op: str
    approximate: Literal["tanh", "none"]
    gate: str
    up: str | None
    down: str
    packed: Packed | None = None
    dropout: str | None = None
    dropout_last: bool = False
    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0
    casts: bool = False  # to the dtype of the last layer, as T5, which keeps it in float32
    up_first: bool = False  # the order of the calls, which draw numbers where an adapter has a dropout
    has_activation = True

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the MLP of the one argument that is given; of several, by the module's own forward."""
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        if len(given) != 1:
            return own_class(module).forward(module, *args, **kwargs)
        (x,) = given
        up: Tensor | None = getattr(module, self.up)(x) if self.up is not None and self.up_first else None
        gate: Tensor = getattr(module, self.gate)(x)
        if self.up is not None and not self.up_first:
            up = getattr(module, self.up)(x)
        if self.packed == "up first":
            up, gate = gate.chunk(2, dim=-1)
        down = getattr(module, self.down)
        if self.dropout is None and not self.casts:
            return call_without_keeping(down, self._activated, gate, up)
        h = self._activated(gate, up)
        if self.dropout is not None and not self.dropout_last:
            h = getattr(module, self.dropout)(h)
        if self.casts:
            weight = down.weight
            h = h.to(weight.dtype) if weight.is_floating_point() else h
        y = down(h)
        return getattr(module, self.dropout)(y) if self.dropout is not None and self.dropout_last else y

    def _activated(self, gate: Tensor, up: Tensor | None) -> Tensor:
        interleaved = self.packed == "interleaved"
        if self.op == "swiglu":
            clamp: dict[str, Any] = {"limit": self.limit, "alpha": self.alpha, "offset": self.offset}
            return ops.swiglu(gate, up, interleaved=interleaved, **clamp)
        return ops.geglu(gate, up, approximate=self.approximate, interleaved=interleaved)


def recognised_gated(module: Module) -> Replacement | str | None:
    """Return the replacement of a gated MLP, the reason why one is left, or None for a module that is none.

    >>> recognised_gated(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)))
    """
    parts = _Parts.of(module)
    if parts is None or isinstance(parts, str):
        return parts
    if is_replaced_elsewhere(module):
        return "another library has replaced its forward"
    arguments = parameters_of(own_class(module).forward)
    if not _takes_one_tensor(arguments):
        names = ", ".join(argument.name for argument in arguments or ())
        return f"its forward takes {names}, expected one tensor" if _is_named(module) else None
    named, has_gate, child = _is_named(module), any(_roles(parts.linears)), hooked(module)
    if child is not None and has_gate:
        return f"its {child} has hooks" if named else None
    inside = [each for child in parts.rest.values() for each in child.modules()]
    reason = reason_of_source([module, *inside]) if has_gate else None
    if reason is not None:
        return reason if named else None
    for gated in _hypotheses(parts, module):
        if _has_values_of(gated, module, parts):
            if not _keeps_dtypes(gated, module, parts):
                return "the dtypes of its results follow another rule"
            casts, up_first = _casts(gated, module, parts), _calls_up_first(gated, module, parts)
            return _whole(replace(gated, casts=casts, up_first=up_first), module, parts)
    if not named:
        return None
    return "its results are those of neither swiglu nor geglu" if has_gate else "it has no gate"


def _is_named(module: Module) -> bool:
    """Return True for an MLP by its name: where it is left, the table has a row for it."""
    return any(part in own_class(module).__name__.lower() for part in _NAMES)


def _takes_one_tensor(arguments: list[inspect.Parameter] | None) -> bool:
    """Return True where a forward can be called with one tensor; others, as Moshi's index of a layer, may be None."""
    if not arguments or any(argument.kind is not argument.POSITIONAL_OR_KEYWORD for argument in arguments):
        return False
    return all(argument.default is None for argument in arguments[1:])


@dataclass(frozen=True)
class _Parts:
    """The children of a module by kind."""

    linears: dict[str, tuple[int, int]]  # sizes of inputs and outputs
    dropouts: tuple[str, ...]
    rest: dict[str, Module]  # copies of those without parameters: the activation

    @classmethod
    def of(cls, module: Module) -> _Parts | str | None:
        """Return the parts of what may be a gated MLP, the reason why it cannot be compared, or None."""
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if isinstance(module, torch.jit.ScriptModule) or tensors:
            return None
        linears: dict[str, tuple[int, int]] = {}
        dropouts: list[str] = []
        rest: dict[str, Module] = {}
        others: list[str] = []
        for name, child in module.named_children():
            sizes = _sizes(child)
            if all(isinstance(size, int) for size in sizes):
                linears[name] = sizes  # pyright: ignore[reportArgumentType]
            elif isinstance(child, Dropout):
                dropouts.append(name)
            elif not any(True for _ in (*child.parameters(), *child.buffers())):
                rest[name] = child
            else:
                others.append(name)
        if len(linears) not in (2, 3) or len(dropouts) > 1:
            return None
        if others:
            reason = f"its {others[0]} has parameters, and is no linear layer"
            return reason if _is_named(module) else None
        copies = {name: without_hooks(child) for name, child in rest.items()}
        failed = [name for name, copied in copies.items() if copied is None]
        if failed:
            return f"{failed[0]} cannot be copied, and is not called itself"
        return cls(linears, tuple(dropouts), {name: each for name, each in copies.items() if each is not None})


def _sizes(child: Any) -> tuple[int | None, int | None]:
    """Return the sizes of a linear layer's inputs and outputs; transformers' Conv1D states them as nx and nf."""
    if hasattr(child, "in_features"):
        return child.in_features, getattr(child, "out_features", None)
    return getattr(child, "nx", None), getattr(child, "nf", None)


def _hypotheses(parts: _Parts, module: Module) -> Iterator[Gated]:
    """Yield each reading of the layers that fits their sizes, with the limits that the module states."""
    clamped = clamps_of(module)
    for roles, (op, approximate, *clamp) in product(
        _roles(parts.linears),
        [("swiglu", "tanh"), ("geglu", "tanh"), ("geglu", "none"), *(("swiglu", "tanh", *each) for each in clamped)],
    ):
        gated = Gated(op, approximate, *roles)  # pyright: ignore[reportArgumentType]
        if clamp:
            limit, alpha, offset = clamp
            gated = replace(gated, limit=limit, alpha=alpha, offset=offset)
        if not parts.dropouts:
            yield gated
        for dropout in parts.dropouts:
            yield replace(gated, dropout=dropout)
            yield replace(gated, dropout=dropout, dropout_last=True)


def clamps_of(module: Module) -> list[tuple[float | None, float, float]]:
    """Return the readings (limit, alpha, offset) of a clamped gate, from the numbers that a module states.

    >>> clamps_of(torch.nn.Identity())
    []
    """

    def stated(part: str) -> list[float]:
        numbers = {value for name, value in vars(module).items() if part in name and type(value) in (int, float)}
        return sorted(map(float, numbers))

    limits, alphas = stated("limit"), stated("alpha")
    if not limits and not alphas:
        return []
    return list(product([*limits, None], dict.fromkeys([*alphas, 1.0]), [0.0, 1.0]))


def _roles(linears: dict[str, tuple[int, int]]) -> Iterator[tuple[str, str | None, str, Packed | None]]:
    for first, *middle, down in permutations(linears):
        inner = linears[down][0]
        if middle and linears[first] == linears[middle[0]] and linears[first][1] == inner:
            yield first, middle[0], down, None
        elif not middle and linears[first][1] == 2 * inner:
            yield first, None, down, "gate first"
            yield first, None, down, "up first"
            yield first, None, down, "interleaved"


class _Called(Module):
    """A stand-in whose results show that it is called itself: not its forward, nor a function of its weight."""

    calls: list[Any] | None = None

    def __call__(self, x: Tensor) -> Any:
        if self.calls is not None:
            self.calls.append(self)
        return 1.5 * super().__call__(x) + 0.25

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:  # a default in its place would not be the layer's own
            raise LookupError(f"a layer is asked for {name}") from error


class _Marker(_Called):
    """A stand-in for dropout that shows where it is."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the argument."""
        return x


class _Layer(_Called, Linear):
    """A stand-in for a linear layer."""


def small_layer(seed: int, inputs: int, outputs: int, dtype: torch.dtype) -> Linear:
    """Return a stand-in for a linear layer, whose results show that it is called."""
    layer = Linear(inputs, outputs, device="meta", dtype=dtype)
    layer.weight = Parameter(numbers(seed, outputs, inputs, dtype=dtype), False)
    layer.bias = Parameter(numbers(seed + 1, outputs, dtype=dtype), False)
    layer.__class__ = _Layer  # after torch's own questions for its attributes
    return layer


def _children(gated: Gated, parts: _Parts, dtype: torch.dtype, last: torch.dtype) -> dict[str, Module]:
    width = _INNER if gated.up else 2 * _INNER
    children: dict[str, Module] = dict(parts.rest)
    children[gated.gate] = small_layer(1, _IN, width, dtype)
    if gated.up is not None:
        children[gated.up] = small_layer(3, _IN, width, dtype)
    children[gated.down] = small_layer(5, _INNER, _OUT, last)
    return children | dict.fromkeys(parts.dropouts, _Marker())


def _expected(gated: Gated, children: dict[str, Module], x: Tensor) -> Tensor:
    """Compute the MLP by the reference of its op."""
    gate = children[gated.gate](x)
    up = None if gated.up is None else children[gated.up](x)
    if gated.packed == "up first":
        up, gate = gate.chunk(2, dim=-1)
    interleaved = gated.packed == "interleaved"
    settings = (
        (gated.limit, gated.alpha, gated.offset, interleaved)
        if gated.op == "swiglu"
        else (gated.approximate, interleaved)
    )
    h = ops.OPS[gated.op].reference(gate, up, *settings)
    dropout = children[gated.dropout] if gated.dropout else None
    h = dropout(h) if dropout is not None and not gated.dropout_last else h
    y = children[gated.down](h)
    return dropout(y) if dropout is not None and gated.dropout_last else y


def _has_values_of(gated: Gated, module: Module, parts: _Parts) -> bool:
    """Return True where the module's own forward agrees, with gates small and large: a clamp is noticed."""
    children = _children(gated, parts, torch.float64, torch.float64)
    own, agrees = twin(module, {}, children), False
    for seed, shape in enumerate([(2, 3, _IN), (3, _IN)], 10):
        for factor in (0.3, 1.0, 1e4):
            x = numbers(seed, *shape, dtype=torch.float64) * factor
            result = called(own_class(module).forward, own, x.clone())
            if isinstance(result, Raised):
                continue  # a rank for which the forward raises is never seen in the model
            if not near(result, called(_expected, gated, children, x), _TOLERANCE):
                return False
            agrees = True
    return agrees


def _whole(gated: Gated, module: Module, parts: _Parts) -> Replacement | str:
    """Return the MLP, or what its forward does beside it."""
    children = _children(gated, parts, torch.float64, torch.float64)
    calls = ((numbers(12, *shape, _IN, dtype=torch.float64),) for shape in TOKENS)
    own, forward = twin(module, {}, children), own_class(module).forward
    return seen_whole(gated, own, forward, partial(_expected, gated, children), calls, _TOLERANCE, narrow=True)


def _keeps_dtypes(gated: Gated, module: Module, parts: _Parts) -> bool:
    """Return True where the module's own forward agrees in other dtypes and under autocast, small numbers and large."""
    for (dtype, autocast), factor in product(
        ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)), (1.0, 1e3)
    ):

        def run(function: Any, *args: Any, autocast: bool = autocast) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return function(*args)

        children = _children(gated, parts, dtype, dtype)
        x = numbers(10, 2, 3, _IN, dtype=dtype) * factor
        result = called(run, own_class(module).forward, twin(module, {}, children), x.clone())
        if isinstance(result, Raised):
            continue  # of a module that casts its argument
        expected = called(run, _expected, gated, children, x)
        if result.dtype is not expected.dtype or not near(result, expected, _NARROW):
            return False
    return True


def _calls_up_first(gated: Gated, module: Module, parts: _Parts) -> bool:
    """Return True where the module calls the layer of up before that of the gate."""
    children, calls = _children(gated, parts, torch.float64, torch.float64), list[Any]()
    for each in children.values():
        if isinstance(each, _Called):
            each.calls = calls
    for rank in (3, 2):
        called(own_class(module).forward, twin(module, {}, children), numbers(10, 2, 3, _IN)[: rank - 1].double())
    return gated.up is not None and calls[:1] == [children[gated.up]]


def _casts(gated: Gated, module: Module, parts: _Parts) -> bool:
    """Return True where the module casts to the dtype of its last layer."""
    own = twin(module, {}, _children(gated, parts, torch.bfloat16, torch.float32))
    result = called(own_class(module).forward, own, numbers(10, 2, 3, _IN, dtype=torch.bfloat16))
    return isinstance(result, Tensor) and result.dtype is torch.float32

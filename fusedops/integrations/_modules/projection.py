"""Activations with at most one linear layer, before them (GEGLU, SwiGLU and GELU of diffusers), by their results.

The layer of a gated one gives the gate and what it multiplies in one tensor. Which half is which follows from the
results, as for a whole gated MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import gelu, linear

from fusedops import ops
from fusedops._torch import autocasts
from fusedops.integrations._modules.activations import is_gelu_served
from fusedops.integrations._modules.gated import Packed, small_layer
from fusedops.integrations._replacement import Replacement, own_class
from fusedops.integrations._trial.source import reason_of_source
from fusedops.integrations._trial.twin import (
    Raised,
    called,
    has_tensors,
    hooked,
    is_replaced_elsewhere,
    is_untouched,
    near,
    numbers,
    parameters_of,
    twin,
    without_hooks,
)
from fusedops.integrations._trial.whole import TOKENS, seen_whole

_IN, _INNER = 8, 12  # sizes of the small layer
_TOLERANCE = 1e-6  # of float64; GELU by tanh differs from GELU by erf by 5e-4
_NARROW = 2.0**-5  # of bfloat16, with a rounding of each function
_NAMES = ("glu", "gelu", "gated")


@dataclass(frozen=True)
class Projection(Replacement):
    """The settings of a replaced activation: the name of the layer before it, or None, and the activation."""

    op: str
    approximate: Literal["tanh", "none"]
    packed: Packed | None  # of a gated one
    layer: str | None
    has_activation = True

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the activation of the one argument; of others, by the module's own forward."""
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        if len(given) != 1:
            return own_class(module).forward(module, *args, **kwargs)
        layer: Any = None if self.layer is None else getattr(module, self.layer)
        if self.packed is None and _is_joined(layer, given[0]):
            return ops.bias_gelu(linear(given[0], layer.weight), layer.bias, approximate=self.approximate)
        x: Tensor = given[0] if layer is None else layer(given[0])
        if self.packed is None and not is_gelu_served(x):
            return gelu(x, approximate=self.approximate)
        return self.activated(ops.swiglu, ops.geglu, ops.bias_gelu, x)

    def activated(self, swiglu: Any, geglu: Any, gelu: Any, packed: Tensor) -> Tensor:
        """Compute the activation by these functions."""
        if self.packed is None:
            return gelu(packed, approximate=self.approximate)
        gate, up = packed, None
        if self.packed == "up first":
            up, gate = packed.chunk(2, dim=-1)
        interleaved = self.packed == "interleaved"
        if self.op == "swiglu":
            return swiglu(gate, up, interleaved=interleaved)
        return geglu(gate, up, approximate=self.approximate, interleaved=interleaved)


def _is_joined(layer: Any, x: Tensor) -> bool:
    """Return True where the op adds the bias of a layer, which torch's copies to each row before the product.

    Of 16 bits the product would be rounded once more before it.
    """
    if type(layer) is not Linear or getattr(layer, "bias", None) is None or not is_untouched(layer):
        return False
    return x.dtype in (torch.float32, torch.float64) and is_gelu_served(x) and not autocasts(x.device.type)


def recognised_projection(module: Module) -> Replacement | str | None:
    """Return the replacement of an activation, the reason why one is left, or None for another module.

    >>> recognised_projection(torch.nn.Linear(2, 2))
    """
    layer, rest = None, dict[str, Module]()
    if isinstance(module, torch.jit.ScriptModule) or any(True for _ in module.parameters(recurse=False)):
        return None
    if own_class(module).__module__.startswith("torch.") or any(True for _ in module.buffers(recurse=False)):
        return None
    for name, child in module.named_children():
        is_layer = hasattr(child, "in_features") and hasattr(child, "out_features")
        if (has_tensors(child) and not is_layer) or (is_layer and layer is not None):
            return None
        layer = name if is_layer else layer
        if not is_layer:
            rest[name] = child
    named = any(part in own_class(module).__name__.lower() for part in _NAMES)
    arguments = parameters_of(own_class(module).forward)
    if not arguments or any(each.kind is each.POSITIONAL_OR_KEYWORD for each in arguments[1:]):
        return None
    if not named and (layer is None or not rest):
        return None
    if is_replaced_elsewhere(module):
        return "another library has replaced its forward" if named else None
    child = hooked(module)
    if child is not None:
        return f"its {child} has hooks" if named else None
    inside = [each for child in rest.values() for each in child.modules()]
    reason = reason_of_source([module, *inside], tried=("mps",))
    copies = {name: without_hooks(child) for name, child in rest.items()}
    if reason is None and None in copies.values():
        reason = "its activation cannot be copied, and is not called itself"
    if reason is not None:
        return reason if named else None
    children = {name: each for name, each in copies.items() if each is not None}
    for found in _hypotheses(layer):
        if _has_values_of(found, module, children):
            own, calls = _twin(found, module, children, torch.float64), (_x(found, 12, shape) for shape in TOKENS)
            expected = partial(_expected, found, own)
            return seen_whole(found, own, own_class(module).forward, expected, ((x,) for x in calls), _TOLERANCE)
    return "its results are those of neither swiglu nor geglu" if named else None


def _hypotheses(layer: str | None) -> Iterator[Projection]:
    kinds: list[tuple[str, Any]] = [("swiglu", "tanh"), ("geglu", "tanh"), ("geglu", "none")]
    packings: list[Packed] = ["up first", "gate first", "interleaved"]
    for (op, approximate), packed in product(kinds, packings):
        yield Projection(op, approximate, packed, layer)
    if layer is not None:
        yield Projection("bias_gelu", "tanh", None, layer)
        yield Projection("bias_gelu", "none", None, layer)


def _x(found: Projection, seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    return numbers(seed, *shape, _IN if found.layer is not None else 2 * _INNER, dtype=dtype)


def _twin(found: Projection, module: Module, children: dict[str, Module], dtype: torch.dtype) -> Any:
    layers = {} if found.layer is None else {found.layer: small_layer(1, _IN, 2 * _INNER, dtype)}
    return twin(module, {}, {**children, **layers})


def _expected(found: Projection, own: Any, x: Tensor) -> Tensor:
    """Compute the activation by the reference of its op."""

    def swiglu(gate: Tensor, up: Tensor | None, *, interleaved: bool) -> Tensor:
        return ops.OPS["swiglu"].reference(gate, up, None, 1.0, 0.0, interleaved)

    def geglu(gate: Tensor, up: Tensor | None, *, approximate: str, interleaved: bool) -> Tensor:
        return ops.OPS["geglu"].reference(gate, up, approximate, interleaved)

    def gelu(x: Tensor, *, approximate: str) -> Tensor:
        return ops.OPS["bias_gelu"].reference(x, None, approximate)

    return found.activated(swiglu, geglu, gelu, x if found.layer is None else getattr(own, found.layer)(x))


def _has_values_of(found: Projection, module: Module, children: dict[str, Module]) -> bool:
    """Return True where the module's own forward agrees, small numbers and large, also in other dtypes."""
    cases = [(torch.float64, False, _TOLERANCE), (torch.float32, False, 1e-4)]
    cases += [(torch.float32, True, _NARROW), (torch.bfloat16, False, _NARROW)]
    for (dtype, autocast, tolerance), factor in product(cases, (0.3, 1e3)):

        def run(function: Any, *args: Any, autocast: bool = autocast) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return function(*args)

        own, x = _twin(found, module, children, dtype), _x(found, 10, (2, 3), dtype) * factor
        result = called(run, own_class(module).forward, own, x.clone())
        expected = called(run, _expected, found, own, x)
        if isinstance(result, Raised) or isinstance(expected, Raised) or not isinstance(result, Tensor):
            return False
        if result.dtype is not expected.dtype or not near(result, expected, tolerance):
            return False
    return True

"""A linear layer and the activation behind it, in modules whose own code calls both (BERT's, ViT's, T5's, Whisper's).

The module's own forward runs, with one call in place of two: the layer computes the activation too, and the activation
returns what it gets. That the code has no other use for what lies between them is seen by its results: it runs on small
random numbers with stand-ins for its layers, both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from fusedops import ops
from fusedops._torch import is_traced
from fusedops.integrations._modules.linear import Dense, is_served, recognised_linear
from fusedops.integrations._replacement import Replacement, own_class
from fusedops.integrations._trial.source import reason_of_source
from fusedops.integrations._trial.twin import (
    Raised,
    called,
    has_hooks,
    has_tensors,
    is_replaced_elsewhere,
    near,
    numbers,
    parameters_of,
    twin,
    without_hooks,
)
from fusedops.integrations._trial.whole import TOKENS
from fusedops.ops.experts.arguments import PLAIN
from fusedops.ops.linear.linear import act_of

_WIDTH = 8
_MOST_CHILDREN = 16
_TOLERANCE = 1e-6  # of float64; GELU by tanh differs from GELU by erf by 5e-4, and a rounded sqrt(2 / pi) by 1e-9


@dataclass(frozen=True)
class Activated(Replacement):
    """A module whose own forward runs with the linear layer of a name that computes the activation of another name.

    In evaluation without gradients: backward would compute the sum before the activation again.
    """

    layer: str
    child: str
    activation: str
    op: str = "linear"
    when: str = "evaluation"
    runs_own_code = True

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        own = own_class(module).forward
        if module.training or torch.is_grad_enabled() or is_traced():
            return own(module, *args, **kwargs)
        return own(_Joined(module, self, self._computed), *args, **kwargs)

    def _computed(self, module: Any, x: Tensor) -> Tensor | None:
        """Return the activation, or None where the layer and the activation are to be called as modules."""
        layer, child = getattr(module, self.layer), getattr(module, self.child)
        if own_class(layer) is not Linear or is_replaced_elsewhere(layer) or has_hooks(layer) or has_hooks(child):
            return None
        return ops.linear(x, layer.weight, layer.bias, activation=self._name) if is_served(layer, x) else None

    @property
    def _name(self) -> Any:
        return self.activation


class _Joined:
    """A module as its own forward sees it: its attributes, but for the layer and the activation."""

    __slots__ = ("_computed", "_last", "_module", "_names")
    _last: Tensor | None  # what the layer returned, until the activation gets it

    def __init__(self, module: Any, names: Activated, computed: Callable[[Any, Tensor], Tensor | None]) -> None:
        self._module, self._names, self._computed, self._last = module, names, computed, None

    def __getattr__(self, name: str) -> Any:
        if name == self._names.layer:
            return self._layer
        return self._activation if name == self._names.child else getattr(self._module, name)

    def waits_for_activation(self) -> bool:
        """Return True where the activation has not got what the layer returned."""
        return self._last is not None

    def _layer(self, x: Tensor) -> Any:
        self._last = self._computed(self._module, x)
        return getattr(self._module, self._names.layer)(x) if self._last is None else self._last

    def _activation(self, x: Tensor) -> Any:
        if x is not self._last:
            return getattr(self._module, self._names.child)(x)
        self._last = None
        return x


def recognised_activated(module: Module) -> Activated | None:
    """Return the replacement of a module with a linear layer and an activation, or None.

    >>> recognised_activated(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    """
    children = dict(module.named_children())
    if len(children) > _MOST_CHILDREN or is_replaced_elsewhere(module):
        return None
    activations = {name: activation_of(child) for name, child in children.items()}
    activations = {name: activation for name, activation in activations.items() if activation is not None}
    if not activations:
        return None
    layers = [name for name, child in children.items() if isinstance(recognised_linear(child), Dense)]
    if not layers or reason_of_source([module], tried=("float16",), outside=True) is not None:
        return None
    for (child, activation), layer in product(activations.items(), layers):
        if _computes_the_same(Activated(layer, child, activation), module):
            return Activated(layer, child, activation)
    return None


def activation_of(module: Module) -> str | None:
    """Return the name of the activation that a module computes, as ``linear`` has them, or None.

    >>> activation_of(torch.nn.ReLU()), activation_of(torch.nn.Tanh())
    ('relu', None)
    """
    if isinstance(module, torch.jit.ScriptModule) or has_tensors(module) or any(True for _ in module.children()):
        return None
    arguments = parameters_of(own_class(module).forward)
    if not arguments or len(arguments) != 1 or is_replaced_elsewhere(module):
        return None
    alone = without_hooks(module)
    if alone is None or reason_of_source([module]) is not None:
        return None
    x = torch.cat([numbers(0, 64, dtype=torch.float64), numbers(1, 64, dtype=torch.float64) * 1e3])
    result = called(own_class(alone).forward, alone.train(False), x.clone())
    return next((name for name in PLAIN if near(result, act_of(name)(x), _TOLERANCE)), None)


class _StandIn(Module):
    """A stand-in for a layer: it keeps the width, and returns as many results as asked."""

    def __init__(self, seed: int, results: int) -> None:
        super().__init__()
        self.weight = Parameter(numbers(seed, _WIDTH, _WIDTH, dtype=torch.float64), False)
        self.results = results

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the product of the first tensor."""
        y = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)) @ self.weight
        return y if self.results == 1 else (y, *[None] * (self.results - 1))


def _children(module: Module, results: int) -> dict[str, Module] | None:
    """Return stand-ins for the layers of a module, and copies of what has no parameters."""
    children: dict[str, Module] = {}
    for seed, (name, child) in enumerate(module.named_children()):
        if has_tensors(child):
            is_plain = own_class(child) is Linear or "norm" in own_class(child).__name__.lower()
            children[name] = _StandIn(seed, 1 if is_plain else results)
        else:
            copied = without_hooks(child)
            if copied is None:
                return None
            children[name] = copied.train(False)
    return children


def _computes_the_same(found: Activated, module: Module) -> bool:
    """Return True where the module's own forward has the same results both ways."""
    forward = own_class(module).forward
    arguments = parameters_of(forward) or []
    kinds = (arguments[0].POSITIONAL_ONLY, arguments[0].POSITIONAL_OR_KEYWORD) if arguments else ()
    rest = [None for each in arguments[1:] if each.kind in kinds and each.default is each.empty]

    def apart(own: Any, x: Tensor) -> list[Tensor]:
        return list(_tensors(forward(own, x, *rest)))

    def joined(own: Any, x: Tensor) -> list[Tensor]:
        calls: list[Tensor] = []

        def computed(own: Any, x: Tensor) -> Tensor:
            calls.append(act_of(found.activation)(getattr(own, found.layer)(x)))
            return calls[-1]

        view = _Joined(own, found, computed)
        results = apart(view, x)
        if len(calls) != 1 or view.waits_for_activation():
            raise LookupError("the layer or the activation is not called")
        return results

    for results in (1, 2, 3):  # of a layer of another kind, such as attention
        children = _children(module, results)
        if children is None:
            return False
        own = twin(module, {}, children)
        calls = [numbers(2, *shape, _WIDTH, dtype=torch.float64) * size for shape in TOKENS for size in (0.3, 30.0)]
        pairs = [[called(function, own, x.clone()) for function in (apart, joined)] for x in calls]
        pairs = [pair for pair in pairs if not isinstance(pair[0], Raised)]
        if pairs:
            return all(_same(*pair) for pair in pairs)
    return False


def _same(wanted: list[Tensor], results: Any) -> bool:
    return (
        not isinstance(results, Raised)
        and len(results) == len(wanted) > 0
        and all(near(mine, each, _TOLERANCE) for mine, each in zip(results, wanted))
    )


def _tensors(result: Any) -> Iterator[Tensor]:
    """Yield the tensors of a result."""
    for each in cast("tuple[Any, ...]", result if isinstance(result, (tuple, list)) else (result,)):
        if isinstance(each, Tensor):
            yield each

"""Norms beside a gate (Qwen3-Next's, Kimi Linear's, Mamba-2's, Nemotron-H's), recognised by their results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops.dtypes import promoted
from fusedops.integrations._replacement import Replacement, own_class
from fusedops.integrations._trial.source import reason_of_source
from fusedops.integrations._trial.twin import (
    called,
    is_replaced_elsewhere,
    near,
    numbers,
    parameters_of,
    twin,
)
from fusedops.integrations._trial.whole import TOKENS, seen_whole

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_GROUP_SIZES, _GROUP_COUNTS = ("group_size",), ("n_groups", "num_groups", "ngroups")
_TOLERANCE = 2e-5  # of float32
_NARROW = 2.0**-5  # of bfloat16, with a rounding before the weight and one before the gate


@dataclass(frozen=True)
class GatedNorm(Replacement):
    """The settings of a replaced norm. names: of the two arguments of its forward."""

    names: tuple[str, str]
    eps: float
    gate_first: bool
    activation: Literal["silu", "sigmoid"]
    groups: int
    offset: float
    result: Literal["input", "promoted"] = "input"  # the dtype of the result where that of the weight differs
    op: str = "gated_rms_norm"

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the norm of x beside a gate; without a gate, by the module's own forward."""
        given = {**dict(zip(self.names, args)), **kwargs}
        x, gate = (given.get(name) for name in self.names)
        if not isinstance(x, Tensor) or not isinstance(gate, Tensor) or gate.shape != x.shape:
            return own_class(module).forward(module, *args, **kwargs)
        if self.result == "promoted" and x.dtype != module.weight.dtype:
            x = x.to(promoted(x, module.weight))
        return ops.gated_rms_norm(
            x,
            gate,
            module.weight,
            self.eps,
            gate_first=self.gate_first,
            activation=self.activation,
            groups=self.groups,
            offset=self.offset,
        )


def recognised_gated_norm(module: Module) -> Replacement | str | None:
    """Return the replacement of a norm beside a gate, the reason why it is left, or None for another module.

    >>> recognised_gated_norm(torch.nn.RMSNorm(8))
    """
    arguments = _arguments(module)
    if arguments is None:
        return None
    if is_replaced_elsewhere(module):
        return "another library has replaced its forward"
    parameters = dict(module.named_parameters(recurse=False))
    if parameters.keys() != {"weight"} or parameters["weight"].dim() != 1 or dict(module.named_buffers()):
        return "its parameters are not a weight of one dim"
    size, reason = parameters["weight"].shape[0], reason_of_source([module])
    if reason is not None:
        return reason
    norm = next((norm for norm in _hypotheses(module, arguments, size) if _has_values_of(norm, module, size)), None)
    if norm is None:
        return "its results are not those of gated_rms_norm"
    result = _result_rule(norm, module, size)
    if not result:
        return "the dtypes of its results follow another rule"
    weight, norm = numbers(1, size), replace(norm, result=result)
    calls = ((numbers(22, *shape, size), numbers(23, *shape, size)) for shape in TOKENS)
    own, forward = twin(module, {"weight": weight}), own_class(module).forward
    return seen_whole(norm, own, forward, partial(_expected, norm, weight=weight), calls, _TOLERANCE)


def _arguments(module: Module) -> tuple[str, str] | None:
    """Return the names of x and the gate of a forward of a norm that takes the two; None for another module."""
    if any(True for _ in module.children()) or isinstance(module, torch.jit.ScriptModule):
        return None
    arguments = parameters_of(own_class(module).forward) if "norm" in own_class(module).__name__.lower() else None
    if arguments is None or len(arguments) != 2 or arguments[1].name not in ("gate", "z"):
        return None
    plain = all(each.kind is each.POSITIONAL_OR_KEYWORD for each in arguments)
    return (arguments[0].name, arguments[1].name) if plain else None


def _hypotheses(module: Module, names: tuple[str, str], size: int) -> Iterator[GatedNorm]:
    eps = {value for name in _EPS_NAMES if isinstance(value := getattr(module, name, None), float)}
    groups = {1}
    for name in (*_GROUP_SIZES, *_GROUP_COUNTS):
        value = getattr(module, name, None)
        if type(value) is int and value > 0 and size % value == 0:
            groups.add(size // value if name in _GROUP_SIZES else value)
    for each, first, count, offset in product(sorted(eps), (False, True), sorted(groups), (0.0, 1.0)):
        yield GatedNorm(names, each, first, "silu", count, offset)
        yield GatedNorm(names, each, first, "sigmoid", count, offset)


def _expected(norm: GatedNorm, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    options = (norm.gate_first, norm.activation, norm.groups, norm.offset)
    return ops.OPS["gated_rms_norm"].reference(x, gate, weight, norm.eps, *options)


def _has_values_of(norm: GatedNorm, module: Module, size: int) -> bool:
    """Return True where the module's own forward agrees on inputs of several ranks and sizes, eps' own included."""
    weight, agrees = numbers(1, size), False
    own = twin(module, {"weight": weight})
    for seed, shape in enumerate([(2, size), (2, 2, size), (2, 1, size), (1, 2, 2, size)], 10):
        for factor, of_gate in ((1.0, 1.0), (norm.eps**0.5, 1.0), (100.0, 1.0), (1.0, 1e4)):
            x, gate = (numbers(seed, *shape) + 0.5) * factor, numbers(seed + 10, *shape) * of_gate
            result = called(own_class(module).forward, own, x.clone(), gate.clone())
            if isinstance(result, Tensor):
                if not near(result, _expected(norm, x, gate, weight), _TOLERANCE):
                    return False
                agrees = True  # a rank for which the forward raises is never seen in the model
    return agrees


def _result_rule(norm: GatedNorm, module: Module, size: int) -> Literal["input", "promoted"] | None:
    """Return the rule for the dtype of the result, or None."""
    rules: list[Literal["input", "promoted"]] = ["input", "promoted"]
    narrow, wide = torch.bfloat16, torch.float32
    for given, kept in ((narrow, narrow), (narrow, wide), (wide, narrow)):
        x, gate = (numbers(seed, 2, 2, size, dtype=given) for seed in (20, 21))
        weight = numbers(1, size, dtype=kept)
        result = called(own_class(module).forward, twin(module, {"weight": weight}), x.clone(), gate.clone())
        if not isinstance(result, Tensor):
            return None
        dtypes = {"input": given, "promoted": torch.promote_types(given, kept)}
        rules = [rule for rule in rules if dtypes[rule] == result.dtype]
        if not near(result, _expected(norm, x.float(), gate, weight), _NARROW):
            return None
    return rules[0] if rules else None

"""The gates of experts in models (Mixtral's, Qwen3-MoE's, gpt-oss's), recognised by their results.

transformers' experts are one module with stacked weights, which calls its method ``_apply_gate`` for the activation.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops.integrations.transformers._gated import clamps_of
from fusedops.integrations.transformers._replacement import Replaced, Replacement, own_class
from fusedops.integrations.transformers._twin import called, near, numbers, twin

_TOLERANCE = 1e-6  # of float64


class _ReplacedExperts(Replaced):
    def _apply_gate(self, gate_up_out: Tensor) -> Tensor:
        settings: Any = self._fusedops_replacement
        own: Any = self._fusedops_original
        return own._apply_gate(self, gate_up_out) if settings is None else settings.gated(gate_up_out)


@dataclass(frozen=True)
class Experts(Replacement):
    """The settings of experts with a replaced gate."""

    op: str
    interleaved: bool
    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0
    approximate: Literal["tanh", "none"] = "tanh"

    @property
    def mixin(self) -> type[Replaced]:
        """Return the class that has the gate."""
        return _ReplacedExperts

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward, which calls the gate."""
        return module._fusedops_original.forward(module, *args, **kwargs)

    def gated(self, x: Tensor) -> Tensor:
        """Return the gated activation of packed gate and up."""
        if self.op == "geglu":
            return ops.geglu(x, approximate=self.approximate, interleaved=self.interleaved)
        return ops.swiglu(x, limit=self.limit, alpha=self.alpha, offset=self.offset, interleaved=self.interleaved)


def recognised_experts(module: Module) -> Experts | str | None:
    """Return the replacement of experts, the reason why they are left, or None for another module.

    >>> recognised_experts(torch.nn.Linear(2, 2))
    """
    gate: Any = getattr(own_class(module), "_apply_gate", None)
    if gate is None:
        return None
    if not getattr(module, "has_gate", True):
        return "its experts have no gate"
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    own = inspect.unwrap(own_class(module).forward)
    if implementation == "eager" and "_apply_gate" not in own.__code__.co_names:
        return (
            'the implementation "eager" has the gate in its forward; to fix: set_experts_implementation("grouped_mm")'
        )
    same = twin(module, {}, dict(module.named_children()))
    for experts in _hypotheses(module):
        if all(_agrees(experts, gate, same, factor) for factor in (0.3, 1.0, 1e4)):
            return experts
    return "its gate is neither swiglu nor geglu"


def _hypotheses(module: Module) -> Iterator[Experts]:
    for interleaved in (False, True):
        for limit, alpha, offset in ((None, 1.0, 0.0), *clamps_of(module)):
            yield Experts("swiglu", interleaved, limit, alpha, offset)
        yield Experts("geglu", interleaved)
        yield Experts("geglu", interleaved, approximate="none")


def _agrees(experts: Experts, gate: Any, own: Any, factor: float) -> bool:
    """Return True where the experts' own gate agrees on a batch; large numbers show a clamp."""
    x = numbers(10, 5, 24, dtype=torch.float64) * factor
    if experts.op == "geglu":
        expected = ops.OPS["geglu"].reference(x, None, experts.approximate, experts.interleaved)
    else:
        settings = (experts.limit, experts.alpha, experts.offset, experts.interleaved)
        expected = ops.OPS["swiglu"].reference(x, None, *settings)
    return near(called(gate, own, x.clone()), expected, _TOLERANCE)

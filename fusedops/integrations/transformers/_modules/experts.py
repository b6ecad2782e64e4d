"""Experts in models (Mixtral's, Qwen3-MoE's, gpt-oss's), recognised by their results.

transformers' experts are one module with stacked weights. Its own forward runs with small random weights, and is
compared with :func:`fusedops.experts`. Where that differs, as by a norm behind each expert, the gate alone is replaced,
for which transformers calls the method ``_apply_gate``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy as shallow
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from fusedops import ops
from fusedops.integrations._modules.gated import clamps_of
from fusedops.integrations._replacement import Replaced, Replacement, own_body, own_class, replacement_of
from fusedops.integrations._trial.source import reason_of_source
from fusedops.integrations._trial.twin import (
    called,
    hooked,
    near,
    numbers,
    parameters_of,
    twin,
    without_hooks,
)
from fusedops.integrations._trial.whole import reason_of_calls, seen_whole
from fusedops.ops.experts.arguments import PLAIN
from fusedops.ops.experts.formulas import Activation

_TOLERANCE = 1e-6  # of float64
_NO_LORA = (None, None, None, None, 1.0)  # of the op
#: The argument of experts that has factors of LoRA by the names of their weights: (A, B, scale), or None for one.
ADAPTERS = "_fusedops_adapters"


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
    has_activation = True

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


@dataclass(frozen=True)
class WholeExperts(Replacement):
    """The settings of experts that are replaced as a whole.

    Attributes:
        activation: the activation and its options.
        up: the names of the first weight and of its bias, which may be absent.
        down: the same of the second.
        transposed: True where the weights have their last two dims swapped.
        dtype_of_weights: True where the result has the dtype of the routing weights, as Nemotron-H's.
    """

    activation: Activation
    up: tuple[str, str]
    down: tuple[str, str]
    transposed: bool
    dtype_of_weights: bool = False
    op: str = "experts"
    has_activation = True
    takes_adapters = True

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the experts of the tokens, of the routers' indices and of the weights."""
        tensors: list[Any] = [
            getattr(module, name, None) for name in (self.up[0], self.down[0], self.up[1], self.down[1])
        ]
        adapters = kwargs.pop(ADAPTERS, {})
        return self.on(adapters, *tensors, *args, *kwargs.values())

    @property
    def weights(self) -> tuple[str, str]:
        """Return the names of the weights."""
        return self.up[0], self.down[0]

    @property
    def biases(self) -> tuple[str, str]:
        """Return the names of the biases, which may be absent."""
        return self.up[1], self.down[1]

    def on(
        self,
        adapters: Mapping[str, tuple[Tensor, Tensor, float] | None],
        up: Any,
        down: Any,
        up_bias: Any,
        down_bias: Any,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
    ) -> Any:
        """Compute the experts with these weights, tensors or Packed, and with the factors of adapters."""
        act: Any = self.activation
        of_up, of_down = (adapters.get(name) for name in self.weights)
        scales = {each[2] for each in (of_up, of_down) if each is not None}
        scale = scales.pop() if len(scales) == 1 else 1.0
        up_lora, down_lora = (
            None if each is None else (each[0], each[1] if each[2] == scale else each[1] * each[2])
            for each in (of_up, of_down)
        )
        y = ops.experts(
            x.reshape(-1, x.shape[-1]), index, weights, up, down, up_bias, down_bias,
            activation=act.name, limit=act.limit, alpha=act.alpha, offset=act.offset,
            interleaved=act.interleaved, transposed=self.transposed,
            up_lora=up_lora, down_lora=down_lora, lora_scale=scale,
        )  # fmt: skip
        return y.to(weights.dtype).view(x.shape) if self.dtype_of_weights else y.view(x.shape)


def experts_of(module: Module) -> Any:
    """Return the settings of experts that are replaced as a whole, why they are not, or None for another module."""
    already: Any = replacement_of(module)
    if getattr(already, "takes_adapters", False):
        return already
    return recognised_whole_experts(module)


def recognised_whole_experts(module: Module) -> Replacement | str | None:
    """Return the replacement of experts as a whole, what they do beside it, or None where the op computes another.

    >>> recognised_whole_experts(torch.nn.Linear(2, 2))
    """
    small = _SmallExperts.of(module)
    if small is None:
        return None
    reason = reason_of_source([*module.modules()])
    if reason is not None:
        return reason
    for activation in _activations(module):
        found = WholeExperts(activation, small.up, small.down, small.transposed)
        if all(small.agrees(found, factor) for factor in (0.1, 1.0, 1e4)):
            return small.whole(replace(found, dtype_of_weights=small.has_dtype_of_weights()))
    return None


class _SmallExperts:
    """A twin of experts with small random weights, which runs their own forward.

    Args:
        module: the experts.
        up: the names of the first weight and of its bias.
        down: the same of the second.
        sizes: the module's sizes: E, I, H.
    """

    _H, _I = 8, 6

    def __init__(self, module: Any, up: tuple[str, str], down: tuple[str, str], sizes: tuple[int, int, int]) -> None:
        self.up, self.down = up, down
        self.transposed: bool = module.is_transposed
        self._module, (self._experts, inner, width) = module, sizes
        self._inner = self._H if inner == width else self._I
        self._sizes = {width: self._H, inner: self._inner, 2 * inner: 2 * self._inner}
        self._has_bias = getattr(module, up[1], None) is not None

    @classmethod
    def of(cls, module: Any) -> _SmallExperts | None:
        """Return the twin of experts as transformers' decorator makes them, or None for another module."""
        flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
        if any(type(getattr(module, name, None)) is not bool for name in flags) or module.has_post_expert_norm:
            return None
        name = "gate_up_proj" if module.has_gate else "up_proj"
        up, down = getattr(module, name, None), getattr(module, "down_proj", None)
        if not (isinstance(up, Tensor) and isinstance(down, Tensor) and up.dim() == down.dim() == 3):
            return None
        experts, width, inner = down.shape if not module.is_transposed else (*down.shape[:1], *down.shape[:0:-1])
        names = {key for key, _ in module.named_parameters(recurse=False)}
        biases = (f"{name}_bias", "down_proj_bias")
        if names != {name, "down_proj", *(biases if module.has_bias else ())}:
            return None
        return cls(module, (name, biases[0]), ("down_proj", biases[1]), (experts, inner, width))

    def agrees(self, experts: WholeExperts, factor: float) -> bool:
        """Return True where the experts' own forward agrees; large numbers show a clamp."""
        own, call = self._twin(torch.float64), self._call(torch.float64, torch.float64, factor)
        result = called(own_class(self._module).forward, own, *(each.clone() for each in call))
        return near(result, self._expected(experts, own, *call), _TOLERANCE)

    def whole(self, experts: WholeExperts) -> Replacement | str:
        """Return the experts, or what their forward does beside them."""
        own, call = self._twin(torch.float64), self._call(torch.float64, torch.float64, 1.0, 64)
        calls = [call, [each[:1] for each in call]]
        forward = own_class(self._module).forward
        return seen_whole(experts, own, forward, partial(self._expected, experts, own), calls, _TOLERANCE)

    def _expected(self, experts: WholeExperts, own: Any, *call: Tensor) -> Tensor:
        tensors = [getattr(own, name, None) for name in (self.up[0], self.down[0], self.up[1], self.down[1])]
        return ops.OPS["experts"].reference(*call, *tensors, *experts.activation, self.transposed, *_NO_LORA)

    def has_dtype_of_weights(self) -> bool:
        """Return True where the result has the dtype of the routing weights."""
        call = self._call(torch.bfloat16, torch.float32, 1.0)
        result = called(own_class(self._module).forward, self._twin(torch.bfloat16), *call)
        return isinstance(result, Tensor) and result.dtype is torch.float32

    def _call(
        self, dtype: torch.dtype, of_weights: torch.dtype, factor: float, tokens: int = 5
    ) -> tuple[Tensor, Tensor, Tensor]:
        index = (torch.arange(tokens * 2, device="cpu") * 7 % max(self._experts, 1)).view(tokens, 2)
        weights = numbers(3, tokens, 2, dtype=of_weights) * max(factor, 1.0)
        return numbers(4, tokens, self._H, dtype=dtype) * factor, index, weights

    def _twin(self, dtype: torch.dtype) -> Any:
        rows = 2 * self._inner if self._module.has_gate else self._inner
        shapes = [(rows, self._H), (self._H, self._inner)]
        if self.transposed:
            shapes = [(second, first) for first, second in shapes]
        parameters: dict[str, Tensor | None] = {}
        for seed, ((weight, bias), shape, outputs) in enumerate(zip((self.up, self.down), shapes, (rows, self._H))):
            parameters[weight] = Parameter(numbers(seed, self._experts, *shape, dtype=dtype), False)
            if self._has_bias:
                parameters[bias] = Parameter(numbers(seed + 5, self._experts, outputs, dtype=dtype), False)
        children = {name: without_hooks(child) for name, child in self._module.named_children()}
        own = twin(self._module, parameters, {name: each for name, each in children.items() if each is not None})
        attributes = cast("dict[str, Any]", own.__dict__)
        for name, value in attributes.items():
            if type(value) is int and value in self._sizes:
                attributes[name] = self._sizes[value]
        config = shallow(self._module.config)
        config._experts_implementation = "eager"
        attributes["config"] = config
        return own


def _activations(module: Any) -> Iterator[Activation]:
    """Yield the activations that experts may have."""
    if not module.has_gate:
        for name in PLAIN:
            yield Activation(name, None, 1.0, 0.0, False)
        return
    for each in _hypotheses(module):
        if each.op == "swiglu":
            yield Activation("swiglu", each.limit, each.alpha, each.offset, each.interleaved)
        else:
            name = "geglu_tanh" if each.approximate == "tanh" else "geglu"
            yield Activation(name, None, 1.0, 0.0, each.interleaved)


def recognised_experts(module: Module, whole: bool = True) -> Replacement | str | None:
    """Return the replacement of experts, the reason why they are left, or None for another module.

    Args:
        module: any module.
        whole: False where only the gate may be replaced.

    >>> recognised_experts(torch.nn.Linear(2, 2))
    """
    child = hooked(module) if "experts" in own_class(module).__name__.lower() else None
    if child is not None:
        return f"its {child} has hooks"
    experts = recognised_whole_experts(module) if whole else None
    if experts is not None:
        return experts
    gate: Any = getattr(own_class(module), "_apply_gate", None)
    if gate is None:
        return _reason_of_other_experts(module)
    if not getattr(module, "has_gate", True):
        return "its experts have no gate"
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    own = own_body(module)
    if implementation == "eager" and "_apply_gate" not in own.__code__.co_names:
        return (
            'the implementation "eager" has the gate in its forward; to fix: set_experts_implementation("grouped_mm")'
        )
    reason = reason_of_source([*module.modules()])
    if reason is not None:
        return reason
    same, x = (
        twin(module, {}, dict(module.named_children())),
        numbers(10, 64, 24, dtype=torch.float64),
    )  # large: a clamp
    for experts in _hypotheses(module):
        if all(
            near(called(gate, same, each.clone()), _gated(experts, each), _TOLERANCE) for each in (0.3 * x, x, 1e4 * x)
        ):
            calls = [(x,), (x[:1],)]
            return reason_of_calls(partial(gate, same), partial(_gated, experts), calls, _TOLERANCE) or experts
    return "its gate is neither swiglu nor geglu"


def _reason_of_other_experts(module: Module) -> str | None:
    """Return why stacked weights of another form are left (Llama 4's, JetMoE's, LongCat's), or None for no experts."""
    if "experts" not in own_class(module).__name__.lower():
        return None
    if not any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
        return None
    names = [argument.name for argument in parameters_of(own_class(module).forward) or ()]
    if len(names) != 3:
        return f"its forward takes {', '.join(names)}, expected tokens, the indices of their experts, and weights"
    return "it is not made by transformers' use_experts_implementation"


def _hypotheses(module: Module) -> Iterator[Experts]:
    for interleaved in (False, True):
        for limit, alpha, offset in ((None, 1.0, 0.0), *clamps_of(module)):
            yield Experts("swiglu", interleaved, limit, alpha, offset)
        yield Experts("geglu", interleaved)
        yield Experts("geglu", interleaved, approximate="none")


def _gated(experts: Experts, x: Tensor) -> Tensor:
    if experts.op == "geglu":
        return ops.OPS["geglu"].reference(x, None, experts.approximate, experts.interleaved)
    settings = (experts.limit, experts.alpha, experts.offset, experts.interleaved)
    return ops.OPS["swiglu"].reference(x, None, *settings)

"""The MLP for Megatron's specs: its activation is an op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from fusedops import ops
from fusedops.integrations.megatron._core import core
from fusedops.integrations.megatron._left import warn_left

_MLP: Any = core("transformer.mlp").MLP
_quick_gelu: Any = core("fusions.fused_bias_geglu").quick_gelu
_QUICK = 1.702  # x * sigmoid(1.702 * x)
_FORMS = "gelu, or with gated_linear_unit silu, gelu or quick_gelu"


@dataclass(frozen=True)
class Activation:
    """An op in the place of Megatron's activation: of the sum of h and the bias, or of both."""

    function: Callable[..., Tensor]
    takes_bias: bool

    def __call__(self, h: Tensor, bias: Tensor | None) -> Tensor:
        """Return the activation of ``h + bias``."""
        if self.takes_bias:
            return self.function(h, bias)
        return self.function(h if bias is None else h + bias)


@dataclass(frozen=True)
class Left:
    """A reason why Megatron's own code computes an activation."""

    given: str
    needed: str
    fix: str


def activation_of(config: Any) -> Activation | Left:
    """Return the op with the settings of a config, or why there is none.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(activation_func=functional.relu, gated_linear_unit=False)
    >>> activation_of(config).given
    'activation_func relu'
    """
    for name in ("use_te_activation_func", "activation_func_fp8_input_store"):
        if getattr(config, name, False):
            return Left(f"{name} = True", "False", "set it to False")
    if getattr(config, "cpu_offloading", False) and getattr(config, "cpu_offloading_activations", False):
        return Left("cpu_offloading_activations = True", "False", "set it to False")
    activation = config.activation_func
    # Megatron's fused GELU is the tanh form, the one that is not fused the exact one
    form = "tanh" if getattr(config, "bias_activation_fusion", False) else "none"
    if activation is functional.gelu and not config.gated_linear_unit:
        return Activation(partial(ops.bias_gelu, approximate=form), True)
    if not config.gated_linear_unit or activation not in (functional.silu, functional.gelu, _quick_gelu):
        gated = " with gated_linear_unit" if config.gated_linear_unit else ""
        name = getattr(activation, "__name__", repr(activation))
        return Left(f"activation_func {name}{gated}", _FORMS, "choose one of these where the model allows it")
    limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
    if activation is functional.gelu:
        if limit is not None or offset:
            given = f"activation_func gelu with a clamp of {limit} and an offset of {offset:g}"
            return Left(given, "neither", "leave both out, or use silu or quick_gelu")
        return Activation(partial(ops.geglu, approximate=form), False)
    alpha = _QUICK if activation is _quick_gelu else 1.0
    return Activation(partial(ops.swiglu, limit=limit, alpha=alpha, offset=float(offset)), False)


class MLP(_MLP):
    """Megatron's MLP with :func:`fusedops.swiglu`, :func:`fusedops.geglu` or :func:`fusedops.bias_gelu`.

    The linear layers are those of the spec. Where no op computes the activation, Megatron's forward does, and a
    FusedOpsWarning names the reason as the module is built.

    Args:
        config: Megatron's TransformerConfig.
        submodules: the linear layers, as in Megatron's MLP.
        **kwargs: as in Megatron's MLP.

    Source: Megatron-LM, ``megatron/core/transformer/mlp.py``.

    >>> from megatron.core.transformer.mlp import MLP as own
    >>> issubclass(MLP, own)
    True
    """

    def __init__(self, config: Any, submodules: Any, **kwargs: Any) -> None:
        # megatron-core 0.16 passes its group to its own class alone, and warns where it passes no size itself
        if kwargs.get("tp_group") is None:
            kwargs["tp_group"] = core("parallel_state").get_tensor_model_parallel_group(check_initialized=False)
        if kwargs.get("ffn_hidden_size") is None and not kwargs.get("is_expert"):
            kwargs["ffn_hidden_size"] = config.ffn_hidden_size
        super().__init__(config, submodules, **kwargs)
        self.activation = activation_of(self.config)
        if isinstance(self.activation, Left):
            warn_left("MLP", self.activation.given, self.activation.needed, self.activation.fix)

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any) -> Any:
        """Return the output and the bias that is still to be added to it, or None.

        Args:
            hidden_states: (s, b, h).
            per_token_scale: of experts; with it Megatron's forward computes the call.
            **kwargs: as in Megatron's forward.
        """
        activation = self.activation
        if per_token_scale is not None:
            warn_left("MLP", "a per_token_scale", "None", "use Megatron's MLP for experts")
        if isinstance(activation, Left) or per_token_scale is not None:
            own: Any = super()
            return own.forward(hidden_states, per_token_scale, **kwargs)
        h, bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(activation(h, bias))

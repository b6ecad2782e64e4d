"""Every text of the integration of Megatron, word for word."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import megatron_layers as layers
import pytest
import torch
from error_calls import INVALID
from error_texts import Table
from torch.nn import functional

from fusedops import FusedOpsWarning

pytestmark = [*layers.OWN_WARNINGS, pytest.mark.usefixtures("one_rank")]
TABLE = Table(__file__)
pin = TABLE.pin


def ours() -> Any:
    from fusedops.integrations import megatron

    return megatron


def norm(**settings: Any) -> Any:
    given = {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "sequence_parallel": False}
    return ours().Norm(SimpleNamespace(**{**given, **settings}), 4)


def attention(**settings: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    given = SimpleNamespace(**vars(layers.config()) | settings)
    return ours().CoreAttention(given, 1, AttnMaskType.causal, "self")


def attend(training: bool = False, dropout: float = 0.0, **options: Any) -> Any:
    q = torch.zeros(2, 1, 4, 8)
    return attention(attention_dropout=dropout).train(training)(q, q, q, None, **options)


def layer(**settings: Any) -> Any:
    return layers.block(layers.config(**settings), ours().get_gpt_layer_spec)


def mlp(**settings: Any) -> Any:
    return ours().MLP(layers.config(**settings), _linears(), ffn_hidden_size=64)


def _linears() -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec().submodules.mlp
    return getattr(spec, "submodules", None) or spec.keywords["submodules"]


def patched(place: str, *args: Any, **options: Any) -> Any:
    import importlib

    outcome = ours().patch()
    try:
        module, _, name = place.rpartition(".")
        return getattr(importlib.import_module(f"megatron.core.{module}"), name)(*args, **options)
    finally:
        outcome.remove()


WARN = FusedOpsWarning
pin("norm", lambda: norm(normalization="L1"), INVALID)
for name in ("memory_efficient_layer_norm", "fused_residual_rmsnorm", "batch_invariant_mode"):
    pin(f"norm {name}", lambda name=name: norm(**{name: True}), INVALID)
for name in (
    "multi_latent_attention",
    "qk_clip",
    "log_max_attention_logit",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "batch_invariant_mode",
):
    pin(f"attention {name}", lambda name=name: attention(**{name: True}), INVALID)
pin("context parallel", lambda: attention(context_parallel_size=2), INVALID)
pin("a bias", lambda: attend(attention_bias=torch.zeros(1)), INVALID)
pin("packed", lambda: attend(packed_seq_params=object()), INVALID)
pin("dropout", lambda: attend(True, 0.1), WARN)
pin("mla", lambda: ours().get_gpt_layer_spec(multi_latent_attention=True), INVALID)
pin("by position", lambda: ours().get_gpt_layer_spec(8), INVALID)
pin("experts", lambda: ours().get_gpt_layer_spec(num_experts=8), WARN)
pin("two kinds", lambda: layer(num_moe_experts=2, moe_layer_freq=[1, 0]), INVALID)
pin("activation", lambda: mlp(activation_func=functional.relu), WARN)
pin(
    "a clamped GEGLU",
    lambda: mlp(activation_func=functional.gelu, gated_linear_unit=True, activation_func_clamp_value=2.0),
    WARN,
)
pin("te", lambda: mlp(use_te_activation_func=True), WARN)
pin("ops", lambda: ours().patch(ops=["gelu"]), INVALID)
pin("fp8", lambda: patched("fusions.fused_bias_swiglu.bias_swiglu_impl", torch.zeros(2, 4), None, True), WARN)
pin(
    "smoothing",
    lambda: patched(
        "tensor_parallel.cross_entropy.vocab_parallel_cross_entropy", torch.zeros(1, 2), torch.tensor([0]), 0.9
    ),
    WARN,
)

test_a_text, test_no_text_is_left_over = TABLE.tests()

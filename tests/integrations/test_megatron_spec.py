"""Layers of get_gpt_layer_spec beside those of Megatron's local spec, forward and backward."""

from __future__ import annotations

from typing import Any

import megatron_layers as layers
import pytest
import torch
from megatron_layers import B, S, assert_near, block, computed, config, hidden, local_spec
from torch.nn import functional

import fusedops
from fusedops import FusedOpsWarning

pytestmark = [*layers.OWN_WARNINGS, pytest.mark.usefixtures("one_rank")]


def ours() -> Any:
    from fusedops.integrations import megatron

    return megatron


def spec_of(config: Any) -> Any:
    names = {"normalization": config.normalization, "qk_layernorm": config.qk_layernorm}
    return ours().get_gpt_layer_spec(**names, qk_l2_norm=config.qk_l2_norm)


def op_calls() -> set[str]:
    """Return the ops that were called."""
    return {count.op for count in fusedops.stats().counts}


LLAMA = {"normalization": "RMSNorm", "activation_func": functional.silu, "gated_linear_unit": True}
LLAMA |= {"add_bias_linear": False, "num_query_groups": 2}
CONFIGS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "GPT": ({}, {"layer_norm", "attention", "bias_gelu", "bias_dropout_add"}),
    "GPT, fused": ({"bias_activation_fusion": True, "bias_dropout_fusion": True}, {"layer_norm", "bias_gelu"}),
    "Llama": (LLAMA, {"rms_norm", "attention", "swiglu"}),
    "Llama, fused": ({**LLAMA, "bias_activation_fusion": True}, {"rms_norm", "attention", "swiglu"}),
    "a gate with biases": ({**LLAMA, "add_bias_linear": True}, {"swiglu"}),
    "a clamped gate": ({**LLAMA, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0}, {"swiglu"}),
    "GEGLU": ({**LLAMA, "activation_func": functional.gelu}, {"geglu"}),
    "GEGLU, fused": ({**LLAMA, "activation_func": functional.gelu, "bias_activation_fusion": True}, {"geglu"}),
    "norms of q and k": ({**LLAMA, "qk_layernorm": True}, {"rms_norm"}),
    "norms of q and k without a weight": ({**LLAMA, "qk_l2_norm": True}, {"rms_norm"}),
    "a window": ({**LLAMA, "window_size": (3, 0)}, {"attention"}),
    "a window on both sides": ({**LLAMA, "window_size": (3, 2)}, {"attention"}),
    "a window of every second layer": ({**LLAMA, "window_size": (3, 0), "window_attn_skip_freq": 2}, {"attention"}),
    "scaling by layers": ({"apply_query_key_layer_scaling": True}, {"attention"}),
    "a scale": ({"softmax_scale": 0.5}, {"attention"}),
    "sinks of 0": ({"softmax_type": "off-by-one"}, {"attention"}),
    "sinks": ({"softmax_type": "learnable"}, {"attention"}),
    "multi-query": ({**LLAMA, "num_query_groups": 1}, {"attention"}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_two_layers_equal_those_of_the_local_spec(name: str) -> None:
    settings, ops = CONFIGS[name]
    chosen = config(**settings)
    want = computed(block(chosen, local_spec(chosen)), hidden(), None)
    fusedops.reset_stats()
    got = computed(block(chosen, spec_of(chosen)), hidden(), None)
    assert ops <= op_calls()
    assert_near(got, want)


@pytest.mark.parametrize("kind", ["padding", "causal and padding", "full"])
def test_two_layers_with_a_mask(kind: str) -> None:
    chosen = config(**LLAMA)
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(B, 1, S, S, generator=generator) < 0.3 if kind == "full" else torch.arange(S) >= S - 2
    mask = mask.expand(B, 1, S, S) | torch.ones(S, S, dtype=torch.bool).triu(1)  # the local spec forgets the causal one
    mask = mask & ~torch.eye(S, dtype=torch.bool)  # no row is fully masked: there Megatron's result is uniform
    want = computed(block(chosen, local_spec(chosen)), hidden(), mask)
    assert_near(computed(block(chosen, spec_of(chosen)), hidden(), mask), want)


def test_a_mask_is_joined_with_the_causal_mask() -> None:
    chosen = config(**LLAMA)
    padding = (torch.arange(S) >= S - 2).expand(B, 1, 1, S)
    both = padding | torch.ones(S, S, dtype=torch.bool).triu(1)
    layers_ = block(chosen, spec_of(chosen)).eval()
    assert torch.equal(layers_(hidden(), padding), layers_(hidden(), both))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_layers_in_16_bits(dtype: torch.dtype) -> None:
    """Closer to the layers in float32 than Megatron's own."""
    flags = {"bf16": dtype is torch.bfloat16, "fp16": dtype is torch.float16, "params_dtype": dtype}
    exact = config(**LLAMA)
    want = computed(block(exact, local_spec(exact)), hidden().to(dtype).float(), None)["output"]
    chosen = config(**LLAMA, **flags)
    results = {}
    for spec in (local_spec(chosen), spec_of(chosen)):
        results[spec is not None, len(results)] = computed(block(chosen, spec).to(dtype), hidden().to(dtype), None)
    own, got = (each["output"] for each in results.values())
    assert got.dtype is own.dtype is dtype
    assert float((got.float() - want).norm()) <= 1.2 * float((own.float() - want).norm())


def test_state_dicts_have_the_same_names_and_load() -> None:
    chosen = config(**LLAMA, qk_layernorm=True)
    own, got = block(chosen, local_spec(chosen), seed=1), block(chosen, spec_of(chosen), seed=2)
    assert [*got.state_dict()] == [*own.state_dict()]
    got.load_state_dict(own.state_dict())
    assert_near(computed(got, hidden(), None), computed(own, hidden(), None))


def test_the_checkpoint_of_megatron_has_the_same_keys() -> None:
    chosen = config(**LLAMA)
    metadata = {"dp_cp_group": torch.distributed.group.WORLD}
    own, got = (
        block(chosen, spec).sharded_state_dict(metadata=metadata) for spec in (local_spec(chosen), spec_of(chosen))
    )
    assert sorted(got) == sorted(own)


def test_the_spec_as_the_command_line_passes_it() -> None:
    """``--spec fusedops.integrations.megatron get_gpt_layer_spec``: Megatron does not call what it imports."""
    from megatron.core.transformer.spec_utils import import_module

    spec = import_module(["fusedops.integrations.megatron", "get_gpt_layer_spec"])
    for settings in ({}, LLAMA, {**LLAMA, "qk_layernorm": True}, {**LLAMA, "qk_l2_norm": True}):
        chosen = config(**settings)
        own = block(chosen, local_spec(chosen))
        fusedops.reset_stats()
        assert_near(computed(block(chosen, spec), hidden(), None), computed(own, hidden(), None))
        assert "attention" in op_calls()


def test_a_called_spec_builds_a_layer_for_megatron() -> None:
    layer = ours().get_gpt_layer_spec(config=config(), layer_number=1)
    assert isinstance(layer.self_attention.core_attention, ours().CoreAttention)


def test_the_block_has_the_norm_after_the_last_layer() -> None:
    chosen = config(**LLAMA)
    want = computed(block(chosen, local_spec(chosen)), hidden(), None)
    got = block(chosen, ours().get_gpt_block_spec(chosen))
    assert isinstance(got.final_layernorm, fusedops.nn.RMSNorm)
    assert_near(computed(got, hidden(), None), want)


def test_the_stages_of_a_pipeline() -> None:
    """A stage has its share of the layers, and hands on a tensor that is no view, which Megatron's schedule frees."""
    chosen = config(**LLAMA | {"num_layers": 6}, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    for stage in (0, 1):
        spec = ours().get_gpt_block_spec(chosen, pp_rank=stage)
        assert len(spec.layer_specs) == 3
        assert spec.layer_norm is ours().Norm
    first = block(config(**LLAMA), ours().get_gpt_block_spec(config(**LLAMA)))
    assert first(hidden(), None)._base is None


def test_experts_are_megatrons_own_and_named() -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    with pytest.warns(FusedOpsWarning, match="MoELayer as the MLP"):
        spec = ours().get_gpt_layer_spec(num_experts=2)
    assert spec.submodules.pre_mlp_layernorm is ours().Norm
    assert getattr(spec.submodules.mlp, "module", None) is MoELayer or "MoELayer" in repr(spec.submodules.mlp)
    mixed = config(**LLAMA, num_moe_experts=2, moe_layer_freq=[1, 0], moe_ffn_hidden_size=64)
    with pytest.warns(FusedOpsWarning, match="MoELayer as the MLP"):
        first, second = ours().get_gpt_block_spec(mixed).layer_specs
    assert "MoELayer" in repr(first.submodules.mlp)
    assert "MoELayer" not in repr(second.submodules.mlp)


def test_multi_token_prediction_takes_a_called_spec() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    chosen = config(**LLAMA, mtp_num_layers=1)
    for spec in (spec_of(chosen), ours().get_gpt_block_spec(chosen)):
        (extra,) = get_gpt_mtp_block_spec(chosen, spec, use_transformer_engine=False).layer_specs
        assert "CoreAttention" in repr(extra)


def test_other_parts_of_a_spec_are_kept() -> None:
    own = local_spec(config())
    got = spec_of(config())
    assert got.submodules.self_attention.params == own.submodules.self_attention.params
    assert got.submodules.self_attention.submodules.linear_qkv is own.submodules.self_attention.submodules.linear_qkv
    assert got.submodules.sharded_state_dict_keys_map == own.submodules.sharded_state_dict_keys_map
    assert own.submodules.pre_mlp_layernorm is not got.submodules.pre_mlp_layernorm


@pytest.mark.parametrize("training", [True, False])
def test_dropout_in_attention_is_megatrons_own_and_named(training: bool) -> None:
    """The probability is so small that nothing is dropped."""
    chosen = config(attention_dropout=1e-30)
    own, got = (block(chosen, spec).train(training) for spec in (local_spec(chosen), spec_of(chosen)))
    want = computed(own, hidden(), None)
    fusedops.reset_stats()
    if training:
        with pytest.warns(FusedOpsWarning, match=r"attention_dropout = 1e-30 in training.*attention_dropout=0.0"):
            assert_near(computed(got, hidden(), None), want)
    else:
        assert_near(computed(got, hidden(), None), want)
    assert ("scaled_masked_softmax" if training else "attention") in op_calls()
    assert ("attention" if training else "scaled_masked_softmax") not in op_calls()


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x) ** 2


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"activation_func": squared_relu}, "activation_func squared_relu"),
        ({"activation_func": functional.silu}, "activation_func silu, expected gelu, or with gated_linear_unit"),
        (
            {**LLAMA, "activation_func": functional.gelu, "glu_linear_offset": 1.0},
            "gelu with a clamp of None and an offset of 1",
        ),
    ],
)
def test_an_activation_without_an_op_is_megatrons_own_and_named(settings: dict[str, Any], text: str) -> None:
    chosen = config(**settings)
    want = computed(block(chosen, local_spec(chosen)), hidden(), None)
    with pytest.warns(FusedOpsWarning, match=text):
        got = block(chosen, spec_of(chosen))
    assert_near(computed(got, hidden(), None), want)


def test_quick_gelu() -> None:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    chosen = config(**LLAMA | {"activation_func": quick_gelu, "glu_linear_offset": 1.0})
    want = computed(block(chosen, local_spec(chosen)), hidden(), None)
    fusedops.reset_stats()
    assert_near(computed(block(chosen, spec_of(chosen)), hidden(), None), want)
    assert "swiglu" in op_calls()

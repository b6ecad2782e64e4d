"""quantize with experts=: mixtures of transformers whose experts are packed, their state dict, and the way back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import fusedops
from fusedops import FusedOpsWarning
from fusedops.integrations.transformers import Row, apply, quantize
from fusedops.quantization import pack, unpack

IDS = torch.arange(3, 25).view(2, 11)
OTHERS = ["*_proj", "lm_head", "*embed_tokens"]  # no experts
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SIZES, intermediate_size=96, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def qwen3() -> Any:
    config = transformers.Qwen3MoeConfig(**SIZES, intermediate_size=96, moe_intermediate_size=32, num_experts=8)
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        **SIZES, intermediate_size=64, num_local_experts=4, rope_parameters={"rope_type": "default"}
    )
    model = transformers.GptOssForCausalLM(config)
    for each in model.model.layers:
        each.mlp.experts.gate_up_proj_bias.data.normal_()
        each.mlp.experts.down_proj_bias.data.normal_()
    return model


MODELS: dict[str, Callable[[], Any]] = {"Mixtral": mixtral, "Qwen3Moe": qwen3, "GptOss": gpt_oss}
every_model = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def experts_of(model: Any) -> list[Any]:
    return [each for each in model.modules() if type(each).__name__.endswith("Experts")]


def rounded(model: Any, format: str) -> Any:
    """Round the experts of a plain model to the values of a format."""
    for each in experts_of(model):
        for weight in (each.gate_up_proj, each.down_proj):
            as_packed = weight.data.mT if each.is_transposed else weight.data
            values = unpack(pack(as_packed, format))
            weight.data = values.mT.contiguous() if each.is_transposed else values
    return model


@every_model
@pytest.mark.parametrize("first", [apply, quantize])
def test_packed_experts_compute_what_unpacked_ones_do(name: str, first: Any) -> None:
    want = logits(rounded(made(name), "MXFP4"))
    model = made(name)
    calls = [lambda: apply(model), lambda: quantize(model, skip=[*OTHERS, "*.layers.1.*"], experts="MXFP4")]
    left = [call() for call in (calls if first is apply else calls[::-1])]
    kind = type(experts_of(model)[0]).__name__
    assert Row(kind, "", 1, "skip has its name") in left[first is apply].rows
    assert quantize(model, skip=OTHERS, experts="MXFP4").ops == {"quantized_experts": 2}
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)


@every_model
def test_the_way_back_and_the_state_dict(name: str) -> None:
    model, plain = made(name), rounded(made(name), "Q8_0")
    names = [key for key, _ in model.named_parameters()]
    want = logits(plain)
    model.requires_grad_(False)
    packed = quantize(model, skip=OTHERS, experts=True)
    other = made(name)
    quantize(other, skip=OTHERS, experts=True)
    for each in (*other.parameters(), *other.buffers()):
        if each.dtype is torch.uint8:
            each.data.zero_()
    other.load_state_dict(model.state_dict())
    for same in (model, other, copy.deepcopy(model)):
        torch.testing.assert_close(logits(same), want, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="gate_up_proj_packed_Q8_0"):
        plain.load_state_dict(model.state_dict())
    apply(model).remove()  # which leaves packed experts
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
    packed.remove()
    assert sorted(key for key, _ in model.named_parameters()) == sorted(names)
    assert not any(each.requires_grad for each in model.parameters())
    assert torch.equal(logits(model), want)


def test_generate_and_gradients() -> None:
    plain, model = rounded(made("Mixtral"), "MXFP4"), made("Mixtral")
    quantize(model, skip=OTHERS, experts="MXFP4")
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), plain.generate(IDS, **options))
    for each in (model, plain):
        each(input_ids=IDS, labels=IDS).loss.backward()
    got, want = (each.model.embed_tokens.weight.grad for each in (model, plain))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)


def test_experts_that_are_left_have_a_reason() -> None:
    model = made("Qwen3Moe")
    with pytest.warns(FusedOpsWarning, match="no multiple of 256"):
        left = quantize(model, format="Q4_K", skip=OTHERS, experts=True)
    reason = "a row has 64 weights, no multiple of 256, the block of Q4_K"
    assert Row("Qwen3MoeExperts", "", 2, reason) in left.rows
    with pytest.raises(fusedops.InvalidInputError, match="experts"):
        quantize(model, format="INT8", experts=True)


def test_the_memory_of_experts() -> None:
    model = made("Mixtral").bfloat16()
    before = sum(each.gate_up_proj.nbytes + each.down_proj.nbytes for each in experts_of(model))
    quantize(model, skip=OTHERS, experts="MXFP4")
    after = sum(each.nbytes for one in experts_of(model) for each in (*one.parameters(), *one.buffers()))
    assert after <= 0.27 * before

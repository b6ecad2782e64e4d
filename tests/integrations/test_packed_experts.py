"""quantize with experts=: mixtures of transformers whose experts are packed, their state dict, and the way back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from mixtures import IDS, MODELS, OTHERS, experts_of, logits, made, rounded

import fusedops
from fusedops import FusedOpsWarning
from fusedops.integrations.transformers import Row, apply, quantize

every_model = pytest.mark.parametrize("name", MODELS)


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


@pytest.mark.parametrize("format", ["NVFP4", "FP8_BLOCK", "INT4_GROUP", "FP4_GROUP32"])
def test_experts_in_a_format_of_the_hub(format: str) -> None:
    plain, model = rounded(made("Mixtral"), format), made("Mixtral")
    assert quantize(model, skip=OTHERS, experts=format).ops == {"quantized_experts": 2}
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)


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

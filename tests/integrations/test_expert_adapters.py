"""PEFT's adapters of the experts of mixtures (``target_parameters``), with weights as they are and with packed ones."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import IDS, experts_of, logits, made, rounded
from packed_checkpoints import write_mixture, write_packed

from fusedops.integrations.transformers import Row, apply, from_packed, quantize

pytestmark = [
    pytest.mark.slow,  # its import takes most of the time
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of peft and torch
]
WEIGHTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def with_adapters(model: Any, weights: list[str], **options: Any) -> Any:
    """Return a model with random adapters, the same ones for each model."""
    import peft

    torch.manual_seed(1)
    options = {"target_modules": [], **options}
    config = peft.LoraConfig(r=4, target_parameters=weights, init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


def near(got: Any, want: Any) -> None:
    for name, each in gradients(want).items():
        torch.testing.assert_close(gradients(got)[name], each, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(logits(got), logits(want), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", [WEIGHTS, WEIGHTS[1:]])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_results_and_gradients_are_those_of_peft(
    name: str, weights: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, plain = (with_adapters(made(name), weights, rank_pattern={}) for _ in range(2))
    applied = apply(own)
    assert Row("ParamWrapper", "experts", 2 * len(weights)) in applied.rows
    near(own, plain)
    with own.disable_adapter(), plain.disable_adapter():
        torch.testing.assert_close(logits(own), logits(plain), rtol=1e-4, atol=1e-4)
    own.add_adapter("second", own.peft_config["default"])
    plain.add_adapter("second", plain.peft_config["default"])
    for each in (own, plain):
        for key, value in each.named_parameters():
            if "second" in key:
                value.data.copy_(torch.sin(torch.arange(value.numel(), dtype=value.dtype)).view(value.shape))
        each.base_model.set_adapter(["default", "second"])
    near(own, plain)
    with monkeypatch.context() as patched:  # the sum of weight and adapter is not built
        patched.setattr(torch, "baddbmm", None)
        own.base_model.set_adapter("default")
        gradients(own)
    applied.remove()
    plain.base_model.set_adapter("default")
    near(own, plain)


def trained(model: Any) -> list[float]:
    """Return the losses of three steps."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses: list[float] = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step(), optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "dense fp8"])
def test_adapters_of_a_model_that_was_loaded_packed(tmp_path: Path, kind: str) -> None:
    """They are PEFT's of the unpacked model, by name, and load there."""
    import peft

    weights, modules = ([], ["q_proj", "down_proj"]) if kind == "dense fp8" else (WEIGHTS, ["q_proj"])
    if kind == "dense fp8":
        plain = write_packed(tmp_path, "fp8")
    else:
        plain = write_mixture(tmp_path, kind, **({"moe_intermediate_size": 128} if kind == "fp8" else {}))
    plain, own = (with_adapters(each, weights, target_modules=modules) for each in (plain, from_packed(tmp_path)))
    applied = apply(own)
    near(own, plain)
    losses = trained(own)
    assert losses[0] > losses[1] > losses[2]
    want = logits(own)
    own.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(from_packed(tmp_path), tmp_path / "adapter")
    apply(again)
    assert torch.equal(logits(again), want)
    plain.load_adapter(tmp_path / "adapter", "trained")
    plain.set_adapter("trained")
    torch.testing.assert_close(logits(plain), want, rtol=1e-4, atol=1e-4)
    applied.remove()
    quantize(own, skip=["*"], experts=True).remove()
    torch.testing.assert_close(logits(own.merge_and_unload()), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", [apply, quantize])
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_adapters_of_packed_experts(name: str, first: Any) -> None:
    plain = with_adapters(rounded(made(name), "MXFP4"), WEIGHTS)
    own = with_adapters(made(name), WEIGHTS)
    changes = [lambda: apply(own), lambda: quantize(own, skip=["*_proj", "*lm_head", "*embed_tokens"], experts="MXFP4")]
    done = [each() for each in (changes if first is apply else changes[::-1])]
    near(own, plain)
    losses = trained(own)
    assert losses[0] > losses[1] > losses[2]
    want = logits(own)
    applied, packed = done if first is apply else done[::-1]
    applied.remove()  # which leaves packed experts, and so their wrappers
    torch.testing.assert_close(logits(own), want, rtol=1e-4, atol=1e-4)
    packed.remove()
    assert len(experts_of(own)) == 2
    torch.testing.assert_close(logits(own), want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_step_on_packed_experts_takes_a_third_of_the_memory_of_experts_of_bfloat16() -> None:
    program = """
import re, torch, transformers, peft
from fusedops.integrations.transformers import apply, quantize
def most():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
config = transformers.Qwen3MoeConfig(
    hidden_size=512, moe_intermediate_size=512, num_experts=32, num_hidden_layers=2, vocab_size=64, head_dim=64,
    num_attention_heads=8, num_key_value_heads=2, num_experts_per_tok=2)
model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
lora = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
model = peft.get_peft_model(model, lora)
experts = [each for each in model.modules() if type(each).__name__ == "Qwen3MoeExperts"]
before = sum(each.gate_up_proj.nbytes + each.down_proj.nbytes for each in experts)
apply(model), quantize(model, skip=["*_proj", "lm_head", "*embed_tokens", "*gate"], experts="MXFP4")
after = sum(each.nbytes for one in experts for each in (*one.parameters(), *one.buffers()))
ids = torch.arange(32)[None]
model(input_ids=ids[:, :2], labels=ids[:, :2]).loss.backward()  # what is allocated once
open("/proc/self/clear_refs", "w").write("5")
start = most()
model(input_ids=ids, labels=ids).loss.backward()
print((most() - start + after) / before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0.2 < float(done.stdout) <= 0.35

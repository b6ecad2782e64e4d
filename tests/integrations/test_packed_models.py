"""Models with packed weights: quantize, and from_gguf on files that are written here."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_files import llama, write
from torch import nn

import fusedops.nn
from fusedops import FusedOpsWarning, InvalidInputError
from fusedops._report import threads
from fusedops.integrations.transformers import Row, apply, from_gguf, quantize
from fusedops.quantization import SCALED, dequantize, pack, unpack

IDS = torch.arange(3, 25).view(2, 11)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def is_tied(model: Any) -> bool:
    name = "packed" if isinstance(model.lm_head, fusedops.nn.QuantizedLinear) else "weight"
    return getattr(model.lm_head, name) is getattr(model.model.embed_tokens, name)


def unpacked_by_hand(model: Any, format: str) -> Any:
    """Round the weights of a plain model to the values of a format."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data = dequantize(fusedops.quantization.quantize(module.weight, format), format)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("first", [apply, quantize])
def test_quantize_before_and_after_apply(tied: bool, first: Any) -> None:
    want = logits(unpacked_by_hand(llama(tied), "Q4_0"))
    model = llama(tied)
    applied = (lambda: quantize(model, format="Q4_0")), (lambda: apply(model))
    for call in applied if first is quantize else reversed(applied):
        call()
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
    assert is_tied(model) is tied
    again = quantize(model, format="Q4_0")
    assert again.ops == {"dequantize": 1, "quantized_linear": 15}
    again.remove()
    assert not any(isinstance(each, fusedops.nn.QuantizedLinear) for each in model.modules())
    assert is_tied(model) is tied
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)


def test_int8_rounds_the_input_too_and_its_state_dict_has_the_format() -> None:
    plain, model = llama(tied=True), llama(tied=True)
    packed = quantize(model, format="INT8", skip=["*.o_proj"])
    assert packed.ops == {"dequantize": 1, "int8_linear": 13}
    assert torch.nn.functional.cosine_similarity(logits(model), logits(plain), dim=-1).min() > 0.99
    assert is_tied(model)
    ids = model(input_ids=IDS).logits.sum()
    ids.backward()
    assert model.model.layers[0].self_attn.o_proj.weight.grad.abs().sum() > 0
    other = llama(tied=True)
    quantize(other, format="INT8", skip=["*.o_proj"])
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), logits(model))
    quantize(plain, format="Q8_0", skip=["*.o_proj"])
    with pytest.raises(RuntimeError, match=r"got model\.embed_tokens\.packed_INT8 in the state dict"):
        plain.load_state_dict(model.state_dict())
    q_proj = model.model.layers[0].self_attn.q_proj
    weight = q_proj.weight + 0
    packed.remove()
    assert torch.equal(q_proj.weight, weight)
    wide = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(133_004, 1))
    assert [row.op for row in quantize(wide, format="INT8").rows] == ["int8_linear", ""]


def test_a_part_of_a_model_stays_tied_and_cannot_be_saved(tmp_path: Path) -> None:
    model = llama(tied=True)
    assert Row("Embedding", "", 1, "a module that is left has the same weight") in quantize(model.model).rows
    assert is_tied(model)
    with pytest.raises(InvalidInputError, match="save_pretrained: got a model with packed weights"):
        model.save_pretrained(tmp_path)
    quantize(model)
    assert is_tied(model)
    model.tie_weights()
    quantize(model.model, skip=["*"]).remove()
    assert is_tied(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(transformers.LlamaForCausalLM.from_pretrained(tmp_path)), logits(model))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("part", ["", "model"])
def test_unpacked_weights_have_gradients_and_attributes_as_before(tied: bool, part: str) -> None:
    model = llama(tied)
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].mlp.up_proj.weight.mark = "mine"

    def states(of: Any) -> dict[str, Any]:
        return {name: (each.requires_grad, getattr(each, "mark", "")) for name, each in of.named_parameters()}

    before = states(model)
    packed = quantize(model.get_submodule(part))
    other = copy.deepcopy(model)
    packed.remove(), quantize(other, skip=["*"]).remove()
    assert states(model) == states(other) == before


def test_packed_and_unpacked_in_inference_mode_a_model_can_be_trained() -> None:
    model = llama(tied=True)
    with torch.inference_mode():
        packed = quantize(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert model.model.norm.weight.grad is not None
    with torch.inference_mode():
        packed.remove()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert model.lm_head.weight.grad is not None


def test_what_is_left_has_a_reason() -> None:
    class Twice(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    infinite, large, tied = nn.Linear(32, 2), nn.Linear(32, 2), nn.Linear(32, 5)
    infinite.weight.data[0, 0] = torch.inf
    large.weight.data[0, 0] = 1e7
    other = Twice(32, 5)
    tied.weight = other.weight
    renormed = nn.Embedding(3, 32, max_norm=1.0)
    layers = [nn.Linear(33, 2), nn.Linear(32, 2, device="meta"), infinite, large, other, tied, renormed]
    layers += [nn.Linear(32, 4), nn.Linear(32, 6)]
    layers[-1].weight.register_hook(torch.zeros_like)
    before = [layer.weight for layer in layers]
    with pytest.warns(FusedOpsWarning, match="nothing is replaced"):
        applied = quantize(nn.Sequential(*layers), skip=["7"])
    assert {row.left.partition(",")[0] for row in applied.rows} == {
        "a row has 33 weights",
        "its weight is not loaded",
        "its weight has inf or NaN",
        "its weight has numbers up to 1e+07",
        "skip has its name",
        "its class has a forward of its own",
        "a module that is left has the same weight",
        "max_norm changes its weight",
        "its weight has hooks of its gradient",
    }
    assert all(layer.weight is weight for layer, weight in zip(layers, before))


def unpacked_where_packed(plain: Any, model: Any) -> Any:
    packed = dict(model.named_modules())
    for name, module in plain.named_modules():
        if isinstance(packed[name], (fusedops.nn.QuantizedLinear, fusedops.nn.QuantizedEmbedding)):
            module.weight.data = packed[name].dequantize()
    return plain


def test_a_state_dict_generation_and_a_trained_adapter() -> None:
    model, other = llama(), llama()
    quantize(model), quantize(other)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.packed.flip(0)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), logits(model))
    assert model.dtype is torch.float32
    assert model.generate(IDS[:1], max_new_tokens=3, do_sample=False).shape[1] > IDS.shape[1]
    prompt = nn.Parameter(torch.randn(1, 11, 64) * 0.1)  # below every packed layer
    loss = model(inputs_embeds=prompt, labels=IDS[:1]).loss
    (got,) = torch.autograd.grad(loss, prompt)
    plain = unpacked_where_packed(llama(), model)
    (want,) = torch.autograd.grad(plain(inputs_embeds=prompt, labels=IDS[:1]).loss, prompt)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("format", SCALED)
def test_a_format_of_the_hub(format: str) -> None:
    model, other = llama(tied=True), llama(tied=True)
    q_proj = model.model.layers[0].self_attn.q_proj
    weight = unpack(pack(q_proj.weight, format, group=q_proj.in_features))
    packed, _ = quantize(model, format=format), quantize(other, format=format)
    assert packed.ops == {"dequantize": 1, "quantized_linear": 13 if format == "NF4" else 15}
    plain = unpacked_where_packed(llama(tied=True), model)
    apply(model), apply(other)
    assert is_tied(model)
    assert torch.equal(q_proj.weight.clone(), weight)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)
    tokens = [each.generate(IDS[:1], max_new_tokens=5, do_sample=False) for each in (model, plain)]
    assert torch.equal(*tokens)
    other.model.layers[0].self_attn.q_proj.parts["scales"].zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), logits(model))
    model.bfloat16().float()  # scales keep their dtype
    packed.remove()
    assert torch.equal(q_proj.weight, weight)
    assert is_tied(model)
    assert not list(q_proj.buffers())


def test_numbers_that_a_format_of_the_hub_has_not_are_left() -> None:
    model = nn.Sequential(nn.Linear(64, 4), nn.Linear(64, 4))
    model[0].weight.data[0, 0], model[1].weight.data[:] = torch.inf, 1e-37
    with pytest.warns(FusedOpsWarning, match=r"(?s)inf or NaN.*up to 1e-37, beyond the range of NVFP4"):
        quantize(model, format="NVFP4")


@pytest.mark.parametrize(("tied", "format"), [(True, "Q8_0"), (False, "Q4_1"), (False, "Q5_0"), (True, "F16")])
def test_a_file_gives_the_logits_of_transformers(tmp_path: Path, tied: bool, format: str) -> None:
    path = write(tmp_path / "model.gguf", llama(tied), format)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    model = from_gguf(path)
    torch.testing.assert_close(logits(model), logits(plain.eval()), rtol=1e-4, atol=1e-5)
    packed = [each for each in model.modules() if isinstance(each, fusedops.nn.QuantizedLinear)]
    assert len(packed) == (0 if format == "F16" else 15)
    assert is_tied(model) is tied
    assert apply(model).ops["rms_norm"] == 5
    assert model.generation_config.eos_token_id == plain.generation_config.eos_token_id


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", llama(tied=True), "Q8_0")
    want = logits(from_gguf(path))
    with torch.device("meta"):
        model = from_gguf(path)
    assert torch.equal(logits(model), want)


def test_the_memory_is_that_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", llama(), "Q4_0")
    assert from_gguf(path).get_memory_footprint() < path.stat().st_size


def test_another_dtype_is_that_of_the_other_parameters(tmp_path: Path) -> None:
    model = from_gguf(write(tmp_path / "model.gguf", llama(), "Q8_0"), dtype=torch.bfloat16)
    assert model.model.norm.weight.dtype is model(input_ids=IDS).logits.dtype is torch.bfloat16


@pytest.mark.parametrize(("load", "policy", "expected"), [(14.0, "", 1), (14.0, "passive", 0), (0.5, "", 0)])
def test_threads_that_spin_are_named_once_on_a_busy_machine(
    load: float, policy: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load), raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(threads, "QUOTA", Path("no quota"))
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads.log_spinning_threads.cache_clear()
    lines: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    logger = logging.getLogger("fusedops")
    logger.addHandler(handler)
    try:
        quantize(llama()), quantize(llama())
    finally:
        logger.removeHandler(handler)
    text = (
        "got a load of 14.0 on 2 cores and no OMP_WAIT_POLICY: torch's idle threads spin on cores that other programs "
    )
    assert lines == [f"{text}need; to fix: set OMP_WAIT_POLICY=passive before Python starts"] * expected

"""Applied.benchmark: it measures both states of the user's model, and leaves the model as it was."""

from __future__ import annotations

import time
import types
from typing import Any

import pytest
import torch
import transformers

import fusedops
from fusedops import InvalidInputError
from fusedops.integrations.transformers import apply, quantize


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes, pad_token_id=0))


IDS = torch.arange(1, 21).view(2, 10)


def test_a_forward() -> None:
    model = llama().eval()
    applied = apply(model)
    before = torch.get_rng_state()
    measured = applied.benchmark({"input_ids": IDS}, seconds=0.01)
    assert torch.equal(torch.get_rng_state(), before)
    assert (measured.call, measured.turns) == ("forward", 3)
    assert measured.difference < 1e-5
    assert min(measured.milliseconds.values()) > 0
    # the logits, and more
    assert min(measured.peak_bytes.values()) >= 2 * 10 * 64 * 4
    fusedops.reset_stats()
    model(IDS)
    assert "rms_norm" in str(fusedops.stats())  # it is applied again
    assert "applied takes" in str(measured)


def test_a_training_step_leaves_gradients_and_buffers() -> None:
    model = llama().train()
    model.register_buffer("count", torch.zeros(1))
    model.register_forward_hook(lambda module, *_: module.count.add_(1) and None)
    model(IDS, labels=IDS).loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    measured = apply(model, fused_loss=True).benchmark({"input_ids": IDS, "labels": IDS}, seconds=0.01)
    assert measured.call == "training step"
    assert model.training
    assert model.count.item() == 1
    assert all(torch.equal(parameter.grad, gradients[name]) for name, parameter in model.named_parameters())


def test_the_slower_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64))
    applied = apply(model)
    own = fusedops.layer_norm

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return own(*args, **kwargs)

    monkeypatch.setattr("fusedops.integrations._modules.norms.ops.layer_norm", slow)
    with fusedops.use("cpu,eager"):
        measured = applied.benchmark((torch.ones(4, 64),), seconds=0.01)
    assert measured.milliseconds["applied"] > 100
    assert measured.ratio > 1.5


def test_a_short_call_is_repeated_in_each_turn() -> None:
    calls: list[Any] = []
    model = torch.nn.Sequential(torch.nn.LayerNorm(8))
    model.register_forward_hook(lambda *_: calls.append(1))
    assert apply(model).benchmark((torch.ones(2, 8),), seconds=0.5).turns >= 3
    assert len(calls) > 200


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(1024)
        self.weight = torch.nn.Parameter(torch.ones(2048, 1024))

    def forward(self, x: Any, labels: Any) -> Any:
        y = self.norm(x) @ self.weight.T
        return types.SimpleNamespace(loss=(y - labels).square().mean()) if self.training else y


def test_the_memory_of_a_step_has_the_gradients() -> None:
    model = Wide().train()
    batch = {"x": torch.randn(2, 1024), "labels": torch.zeros(2, 2048)}
    for _ in range(2):
        peaks = apply(model).benchmark(batch, seconds=0.01).peak_bytes
        assert all(model.weight.nbytes <= each < 1.1 * model.weight.nbytes for each in peaks.values())


def test_a_training_step_of_a_model_without_a_loss() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=64, **sizes)).train()
    with pytest.raises(InvalidInputError, match="benchmark: got no loss from BertModel for labels, expected"):
        apply(model).benchmark({"input_ids": IDS, "labels": IDS}, seconds=0.01)


def test_what_cannot_be_measured() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    with pytest.raises(InvalidInputError, match="benchmark: got the outcome of another function, whose"):
        quantize(model).benchmark(torch.ones(1, 32))


class OfNumbers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        return self.norm(x).argmax(-1)


def test_a_result_without_numbers() -> None:
    with pytest.raises(InvalidInputError, match="got a result without a floating tensor from OfNumbers"):
        apply(OfNumbers()).benchmark(torch.ones(2, 8), seconds=0.01)

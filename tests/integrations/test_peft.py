"""LoRA of PEFT on models with packed weights, where peft is installed: ``pip install peft`` is enough."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import llama
from torch import nn

import fusedops.nn
from fusedops.errors import InvalidInputError
from fusedops.integrations.transformers import apply, quantize

pytestmark = [
    pytest.mark.slow,  # its import takes most of the time
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of peft and torch
]
IDS = torch.arange(3, 25).view(2, 11)


def with_adapter(model: Any, **options: Any) -> Any:
    """Return a model with random adapters, the same ones for each model."""
    import peft

    torch.manual_seed(1)
    defaults = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    config = peft.LoraConfig(r=4, **{**defaults, **options})
    return peft.get_peft_model(model, config)


def trained(model: Any) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("Q8_0", {}),
        ("Q4_1", {}),
        ("Q8_0", {"use_dora": True}),
        ("Q8_0", {"trainable_token_indices": [4, 7]}),  # of the tied head, too
    ],
)
def test_an_adapter_on_packed_weights(format: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Its gradients are those on the unpacked weights; it is trained, saved, loaded, and merged after ``remove``."""
    import peft

    model, plain = llama(tied=True), llama(tied=True)
    packed, _ = quantize(model, format=format), apply(model)
    quantize(plain, format=format).remove()  # to the values of the format
    adapted, want = with_adapter(model, **options), with_adapter(plain, **options)
    assert trained(adapted).keys() == trained(want).keys()
    assert all("lora_" in name or "trainable_tokens" in name for name in trained(adapted))
    optimizer = torch.optim.AdamW(trained(adapted).values(), lr=1e-2)
    losses = []
    for step in range(3):
        loss = adapted(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.item())
        if not step:
            want(input_ids=IDS, labels=IDS).loss.backward()
            for name, each in trained(want).items():
                torch.testing.assert_close(trained(adapted)[name].grad, each.grad, rtol=1e-3, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] > losses[1] > losses[2]
    adapted.save_pretrained(tmp_path)
    other = llama(tied=True)
    quantize(other, format=format), apply(other)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(other, tmp_path)), logits(adapted))
    after = logits(adapted)
    names = trained(adapted).keys()
    packed.remove()
    assert trained(adapted).keys() == names
    merged = adapted.merge_and_unload()
    assert not any(isinstance(each, fusedops.nn.QuantizedLinear) for each in merged.modules())
    torch.testing.assert_close(logits(merged), after, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "merge",
    [
        lambda adapted: adapted.merge_adapter(),
        lambda adapted: adapted.merge_and_unload(),
        lambda adapted: adapted.merge_and_unload(safe_merge=True),
    ],
)
def test_a_packed_weight_is_not_merged(merge: Callable[[Any], Any]) -> None:
    model = llama()
    quantize(model)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    adapted = with_adapter(model)
    with pytest.raises(InvalidInputError, match=r"a write to the weight of a packed layer.*to fix: unpack"):
        merge(adapted)
    model = adapted.unload()
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_the_adapter_of_a_tied_embedding_is_that_of_the_head() -> None:
    options = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    model, plain = llama(tied=True), llama(tied=True)
    quantize(model), quantize(plain).remove()
    adapted, want = with_adapter(model, **options), with_adapter(plain, **options)
    assert trained(adapted).keys() == trained(want).keys()
    torch.testing.assert_close(logits(adapted), logits(want), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_a_prompt_is_trained_before_packed_weights(kind: str) -> None:
    import peft

    model, plain, results = llama(tied=True), llama(tied=True), []
    quantize(model), quantize(plain).remove()
    for each in (model, plain):
        torch.manual_seed(1)
        adapted = peft.get_peft_model(each, getattr(peft, kind)(num_virtual_tokens=4, task_type="CAUSAL_LM"))
        results.append(logits(adapted))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_a_packed_layer_is_not_trained_whole() -> None:
    packed, left = llama(), llama()
    quantize(packed), quantize(left, skip=["lm_head"])
    with pytest.raises(InvalidInputError, match=r"the packed weight of lm_head, .*to fix: .*skip=\['lm_head'\]"):
        with_adapter(packed, modules_to_save=["lm_head"])
    assert "lm_head" in " ".join(trained(with_adapter(left, modules_to_save=["lm_head"])))


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_an_adapter_that_starts_by_a_write_is_an_error(start: str) -> None:
    model = llama()
    quantize(model)
    with pytest.raises(InvalidInputError, match="a write to the weight of a packed layer"):
        with_adapter(model, init_lora_weights=start)


def test_weights_are_packed_below_adapters_that_are_skipped() -> None:
    adapted = with_adapter(llama().bfloat16())
    quantize(adapted, skip=["*lora_*"])
    loss = adapted(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert adapted(input_ids=IDS).logits.dtype is torch.bfloat16
    assert all(each.grad is not None and bool(each.grad.any()) for each in trained(adapted).values())
    assert isinstance(adapted.model.model.layers[0].self_attn.q_proj.base_layer, fusedops.nn.QuantizedLinear)

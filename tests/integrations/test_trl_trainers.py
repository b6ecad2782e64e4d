"""SFT, DPO and GRPO of trl on an applied model: the op computes their log probabilities, with plain's losses."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from small_language_model import small_llama, small_tokenizer, words

import fusedops
from fusedops.integrations.transformers import apply, quantize

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return small_tokenizer()


def sft(model: Any, tokenizer: Any, folder: Path) -> Any:
    import datasets
    import trl

    data = datasets.Dataset.from_list([{"text": words(at, 5 + at)} for at in range(8)])
    return trl.SFTTrainer(model, trl.SFTConfig(folder, **_options()), train_dataset=data, processing_class=tokenizer)


def dpo(model: Any, tokenizer: Any, folder: Path) -> Any:
    import datasets
    import trl

    rows = [{"prompt": words(at, 4), "chosen": words(at + 3, 5), "rejected": words(at + 9, 6)} for at in range(8)]
    options = trl.DPOConfig(folder, **_options())
    data = datasets.Dataset.from_list(rows)
    return trl.DPOTrainer(
        model, ref_model=copy.deepcopy(model), args=options, train_dataset=data, processing_class=tokenizer
    )


def grpo(model: Any, tokenizer: Any, folder: Path) -> Any:
    import datasets
    import trl

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    sizes = {"num_generations": 4, "max_completion_length": 6, "beta": 0.0}
    options = trl.GRPOConfig(folder, **{**_options(), "per_device_train_batch_size": 4}, **sizes)
    data = datasets.Dataset.from_list([{"prompt": words(at, 4)} for at in range(8)])
    return trl.GRPOTrainer(model, reward_funcs=reward, args=options, train_dataset=data, processing_class=tokenizer)


def _options() -> dict[str, Any]:
    return {
        "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip


@pytest.mark.parametrize("trainer", [sft, dpo, grpo])
def test_the_losses_of_a_trainer(trainer: Any, tokenizer: Any, tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {}
    for state in ("plain", "applied"):
        import trl  # noqa: F401, before apply

        each = small_llama()
        applied = apply(each) if state == "applied" else None
        fusedops.reset_stats()
        made = trainer(each, tokenizer, tmp_path / state)
        made.train()
        losses[state] = [row["loss"] for row in made.state.log_history if "loss" in row]
        ran = [line for line in str(fusedops.stats()).splitlines() if line.startswith("linear_log_probs")]
        assert bool(ran) == (state == "applied")
        if applied is not None:
            assert applied.ops["linear_log_probs"] == 1
            assert not applied.notes
            applied.remove()
    assert len(losses["plain"]) == 3
    assert losses["applied"] == pytest.approx(losses["plain"], rel=1e-4, abs=1e-5)


def test_the_function_of_trl_is_restored_and_serves_applied_models_alone() -> None:
    from trl.trainer import utils

    own = utils._ChunkedLogProbFunction
    first, second = small_llama(), small_llama()
    one, other = apply(first), apply(second)
    assert utils._ChunkedLogProbFunction is not own
    one.remove()
    assert utils._ChunkedLogProbFunction is not own
    x, target = torch.randn(3, 32, requires_grad=True), torch.tensor([1, 2, 3])
    fusedops.reset_stats()
    for each, runs in ((first, False), (second, True)):
        utils._ChunkedLogProbFunction.apply(x, each.lm_head.weight, None, target, 1.0, 32, None, 1.0, ("log_probs",))
        assert ("linear_log_probs" in str(fusedops.stats())) is runs
    other.remove()
    assert utils._ChunkedLogProbFunction is own


def test_a_packed_head_is_left_to_trl() -> None:
    from trl.trainer import utils

    each, own = small_llama(), utils._ChunkedLogProbFunction
    packed = quantize(each, skip=["model.*"])
    applied = apply(each)
    assert "linear_log_probs" not in applied.ops
    assert [row.left for row in applied.rows if row.family == "linear_log_probs"] == [
        "the head's weight is packed; to fix: leave the head out of quantization"
    ]
    assert utils._ChunkedLogProbFunction is own
    packed.remove()
    assert apply(each).ops["linear_log_probs"] == 1
    applied.remove()


def test_what_the_function_returns() -> None:
    from trl.trainer import utils

    own = utils._ChunkedLogProbFunction
    each = small_llama()
    applied = apply(each)
    weight = each.lm_head.weight
    bias, target = torch.randn(64), torch.randint(64, (9,))
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    for softcap, scale, temperature in ((None, 1.0, 1.0), (5.0, 0.5, 0.7)):
        results = []
        for function in (utils._ChunkedLogProbFunction, own):
            x = torch.randn(9, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
            found = function.apply(x, weight, bias, target, temperature, 32, softcap, scale, outputs)
            gradients = torch.autograd.grad((found[0].sum() + found[1].square().sum()), (x, weight))
            results.append((*found, *gradients))
        for got, expected in zip(*results):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    applied.remove()


def test_a_forward_that_is_replaced_later_is_noted() -> None:
    each = small_llama()
    applied = apply(each, ops=["cross_entropy"])
    assert not applied.notes
    each.forward = lambda *args, **kwargs: None
    (note,) = applied.notes
    assert note.startswith("LlamaForCausalLM.forward was replaced by another library: its cross_entropy runs only if")
    assert "import trl before apply" in str(applied).replace("\n", " ")

"""fusedops.losses and linear_log_probs beside trl's own trainers, where trl is installed.

``pip install trl`` is enough. The trainers compute their losses in methods of their own, which get a stand-in for the
trainer here: a real one needs a data set, and generates for GRPO.
"""

from __future__ import annotations

from collections import defaultdict
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.losses import dpo_loss, grpo_loss
from tests.integrations.test_losses import LEVELS, OPTIONS, PAIRS, SMOOTHED

pytestmark = [
    pytest.mark.slow,  # its import takes most of the time
    pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed"),
    pytest.mark.filterwarnings("ignore"),
]


def _trainer(**attributes: Any) -> Any:
    """Return a stand-in for a trainer of one process in evaluation."""

    def same(value: Any, *args: Any, **options: Any) -> Any:
        return value

    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=same, gather_for_metrics=same, reduce=same, num_processes=1
    )
    model = SimpleNamespace(training=False)
    metrics: Any = defaultdict(lambda: defaultdict(list))
    common = {"accelerator": accelerator, "model": model, "_metrics": metrics, "aux_loss_enabled": False}
    return SimpleNamespace(**common, **attributes)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_log_probabilities_are_those_of_trls_head(temperature: float) -> None:
    transformers: Any = pytest.importorskip("transformers")
    from trl.trainer.utils import add_fused_lm_head  # pyright: ignore

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=61, **sizes)).eval()
    ids, keep = torch.randint(61, (3, 11)), 7
    labels = ids.masked_fill(torch.arange(11) < 11 - keep, -100)
    labels[1, -2:] = -100
    hidden = model.base_model(input_ids=ids).last_hidden_state[:, -keep - 1 : -1]
    head = model.get_output_embeddings()
    ours = fusedops.linear_log_probs(
        hidden, head.weight, labels[:, -keep:], head.bias, temperature=temperature, return_entropy=True
    )
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    theirs = model(input_ids=ids, labels=labels, fused_lm_head=True)
    slopes: list[Any] = []
    for each in (ours, (theirs.log_probs[:, -keep:], theirs.entropy[:, -keep:])):
        slopes.append(torch.autograd.grad(each[0].sum() - 0.3 * each[1].sum(), list(model.parameters())))
    torch.testing.assert_close(ours[0], theirs.log_probs[:, -keep:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours[1], theirs.entropy[:, -keep:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [*PAIRS, "aot", "aot_unpaired"])
def test_a_preference_is_trls(kind: str) -> None:
    from trl import DPOTrainer  # pyright: ignore

    generator = torch.Generator().manual_seed(2)
    logp = -3 * torch.rand(12, 9, generator=generator)
    kept = torch.arange(10) >= torch.randint(2, 6, (12, 1), generator=generator)  # of a prompt and an answer
    logp = (logp * kept[:, 1:]).requires_grad_()
    reference = -8 * torch.rand(2, 6, generator=generator)
    smoothing = SMOOTHED.get(kind, 0.0)

    def model(**given: Any) -> Any:
        none = torch.zeros(12, 9)
        return SimpleNamespace(log_probs=logp, entropy=none, mean_logits=none, is_top1=none.bool())

    trainer = _trainer(
        ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[kind], loss_weights=[1.0],
        beta=0.2, label_smoothing=smoothing, args=SimpleNamespace(discopop_tau=0.05), use_weighting=False,
        _total_train_tokens=0,
    )  # fmt: skip
    inputs = {"input_ids": torch.zeros(12, 10, dtype=torch.long), "attention_mask": torch.ones(12, 10)}
    inputs |= {"completion_mask": kept.long(), "ref_chosen_logps": reference[0], "ref_rejected_logps": reference[1]}
    theirs = DPOTrainer._compute_loss(trainer, model, inputs, False)  # pyright: ignore
    sums, lengths = logp.sum(-1).chunk(2), kept.sum(-1).chunk(2)
    options: dict[str, Any] = {"beta": 0.2, "loss_type": kind, "label_smoothing": smoothing}
    if kind in ("ipo", "sigmoid_norm"):
        options |= {"chosen_lengths": lengths[0], "rejected_lengths": lengths[1]}
    _assert_same(dpo_loss(*sums, *reference, **options), theirs, logp)


@pytest.mark.parametrize(("kind", "level"), LEVELS)
def test_a_policy_gradient_is_trls(kind: str, level: str) -> None:
    from trl import GRPOTrainer  # pyright: ignore

    generator = torch.Generator().manual_seed(3)
    logp = -torch.rand(4, 7, generator=generator)
    old, ref = (logp + 0.3 * torch.randn(4, 7, generator=generator) for _ in range(2))
    mask = (torch.arange(7) < torch.tensor([7, 3, 1, 5])[:, None]).long()
    advantages, logp = torch.randn(4, generator=generator), logp.requires_grad_()
    config = SimpleNamespace(
        delta=1.2 if kind != "cispo" else None, use_bias_correction_kl=False, sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
        steps_per_generation=1,
    )  # fmt: skip
    trainer = _trainer(
        _get_per_token_logps_and_entropies=lambda *args, **given: (logp, torch.zeros(4, 7), None),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level=level, beta=0.05,
        loss_type=kind, epsilon_low=0.1, epsilon_high=0.3, max_completion_length=10, use_vllm=False, args=config,
        current_gradient_accumulation_steps=1, get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _entropy_bonus_enabled=False,
    )  # fmt: skip
    inputs = {"prompt_ids": mask, "prompt_mask": mask, "completion_ids": mask, "completion_mask": mask}
    inputs |= {"advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref}
    theirs = GRPOTrainer._compute_loss(trainer, None, inputs | {"num_items_in_batch": mask.sum()})  # pyright: ignore
    options = {**OPTIONS, "loss_type": kind, "importance_sampling_level": level, "delta": config.delta}
    _assert_same(grpo_loss(logp, advantages, mask, old_logp=old, ref_logp=ref, **options), theirs, logp)


def _assert_same(ours: Tensor, theirs: Tensor, logp: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    slopes = [torch.autograd.grad(each, logp)[0] for each in (ours, theirs)]
    torch.testing.assert_close(*slopes, rtol=1e-5, atol=1e-6)

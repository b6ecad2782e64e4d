"""A plan for this machine's CPU beside the counts of the real run, call for call, for the families of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from model_families import FAMILIES, Family
from torch import Tensor

import fusedops
from fusedops.integrations._replacement import replacement_of
from fusedops.integrations.transformers import apply

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::fusedops.FusedOpsWarning"
)

# with norms, gates, experts, routers, both attentions, short convolutions, recurrences, and without a part of them
QUICK = (
    "Llama", "Qwen3-MoE", "Gemma 2", "Gemma 3n", "GPT-2", "BERT", "T5 v1.1", "Whisper", "Bamba", "Qwen3-Next",
)  # fmt: skip
EACH = [pytest.param(each, marks=[pytest.mark.slow] * (name not in QUICK)) for name, each in FAMILIES.items()]


def counted(rows: Iterable[Any]) -> Counter[Any]:
    """The calls by op, direction, backend and the refusals before it."""
    counts = Counter[Any]()
    for row in rows:
        refused = tuple((each.backend, each.constraint) for each in row.refused)
        counts[row.op, row.direction, row.backend, refused] += row.calls
    return counts


def run(model: Any, inputs: dict[str, Tensor], kind: str) -> None:
    """What a plan of that kind runs, on a real model."""
    model.train(kind == "training")
    if kind == "generation":
        model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    elif kind == "forward":
        with torch.no_grad():
            model(**inputs)
    else:
        outputs = model(**inputs)
        loss = outputs.get("loss")
        floating = [each for each in outputs.values() if isinstance(each, Tensor) and each.requires_grad]
        (loss if loss is not None else sum(each.sum() for each in floating)).backward()


@pytest.mark.parametrize("family", EACH, ids=FAMILIES)
def test_a_plan_has_the_calls_of_the_run(family: Family) -> None:
    model, inputs = family.build(), family.inputs()
    model.config.layerdrop = 0.0  # drawn at random in training
    applied, first = apply(model), Counter[Any]()
    kinds: dict[str, Any] = {"forward": {}, "training": {"train": True}, "generation": {"generate": 3}}
    for kind, options in kinds.items():
        given = dict(inputs)
        if kind == "generation":
            if not family.generates:
                continue
            given.pop("decoder_input_ids", None)
        elif kind == "training" and family.has_vocabulary and "Classification" not in family.model:
            ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
            given |= {"labels": ids} if ids is not None and family.name != "GIT" else {}
        planned = fusedops.plan(model, given, device="cpu", **options)
        fusedops.reset_stats()
        run(model, given, kind)
        assert counted(planned.rows) == counted(fusedops.stats().counts), kind
        first = first or counted(planned.rows)
    assert sum(first.values()) > 0
    if family.name in QUICK[:3]:  # a model without apply is replaced as much, on a copy without numbers
        applied.remove()
        assert counted(fusedops.plan(model, inputs, device="cpu").rows) == first
        assert not any(map(replacement_of, model.modules()))


def test_a_plan_has_the_calls_of_a_fused_loss_and_of_an_mlp_that_computes_again() -> None:
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=2048, num_attention_heads=2, num_hidden_layers=2, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config)
    apply(model, fused_loss=True)
    ids = torch.ones(1, 512, dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids}
    planned = fusedops.plan(model, inputs, device="cpu", train=True)
    fusedops.reset_stats()
    run(model, inputs, "training")
    counts = counted(fusedops.stats().counts)
    assert counted(planned.rows) == counts
    forward = {op: calls for (op, direction, *_), calls in counts.items() if direction == "forward"}
    assert (forward["linear_cross_entropy"], forward["swiglu"]) == (1, 4), "2 layers, and again for backward"

"""A model under rows="independent": the same bits for a prompt alone, in a batch, and by decode after prefill.

torch's products depend on the number of rows, and so the test replaces them by sums in a fixed order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_families import FAMILIES, VOCABULARY
from torch import Tensor, nn

import fusedops
from fusedops.integrations.transformers import apply

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
LENGTHS = (11, 23, 7, 1, 14)
PREFILL = 9


class FixedOrder(nn.Linear):
    """A product whose sums are taken in the order of the inputs, for each output and row by itself."""

    def forward(self, input: Tensor) -> Tensor:
        total = torch.zeros(*input.shape[:-1], self.out_features) if self.bias is None else self.bias.detach()
        for column in range(self.in_features):
            total = total + input[..., column, None] * self.weight[:, column]
        return total


@pytest.fixture(scope="module")
def model() -> Any:
    llama: Any = FAMILIES["Llama"].build().eval().float()
    applied = apply(llama)
    assert applied.ops["attention"] == 2
    for module in llama.modules():
        if type(module) is nn.Linear:
            module.__class__ = FixedOrder
    return llama


@pytest.fixture(scope="module")
def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCABULARY, (1, length), generator=generator) for length in LENGTHS]


def logits(model: Any, ids: Tensor, **inputs: Any) -> Any:
    with torch.no_grad(), fusedops.use(rows="independent"):
        return model(input_ids=ids, **inputs)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_prompt_has_the_same_bits_alone_in_a_batch_and_by_decode(
    model: Any, prompts: list[Tensor], threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = [logits(model, ids).logits[0] for ids in prompts]
        most = max(LENGTHS)
        padded = torch.cat([nn.functional.pad(ids, (0, most - ids.shape[1])) for ids in prompts])
        mask = torch.tensor([[position < length for position in range(most)] for length in LENGTHS]).long()
        fusedops.reset_stats()
        batch = logits(model, padded, attention_mask=mask).logits
        assert {count.backend for count in fusedops.stats().counts} == {"cpu"}
        for want, row, length in zip(alone, batch, LENGTHS):
            assert torch.equal(row[:length], want)
        for want, ids in zip(alone, prompts):
            steps = [step for step in (ids[:, :PREFILL], *ids[:, PREFILL:].split(1, dim=1)) if step.numel()]
            cache, parts = None, []
            for step in steps:
                outputs = logits(model, step, past_key_values=cache, use_cache=True)
                cache, parts = outputs.past_key_values, [*parts, outputs.logits[0]]
            assert torch.equal(torch.cat(parts), want)
    finally:
        torch.set_num_threads(before)


def test_without_the_policy_some_bits_differ(model: Any, prompts: list[Tensor]) -> None:
    """Else the test above shows nothing: without it, attention of a long prompt is in tiles."""
    ids = torch.cat(prompts, dim=1)
    with torch.no_grad():
        whole = model(input_ids=ids).logits[0]
        part = model(input_ids=ids[:, :20]).logits[0]
    assert not torch.equal(part, whole[:20])

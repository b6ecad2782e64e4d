"""seeded_sampling: a request has the same answer alone, beside another one and behind padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops

transformers = pytest.importorskip("transformers", reason="needs transformers")
from fusedops.integrations.transformers import seeded_sampling  # noqa: E402

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 97}


def answers(
    model: Any, prompts: list[list[int]], seeds: list[int], sampled: bool = True, **options: Any
) -> list[Tensor]:
    """Return the new tokens after prompts of several lengths, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
    draw = seeded_sampling(torch.tensor(seeds), longest, **options)
    made = model.generate(
        ids, attention_mask=mask, logits_processor=[draw], do_sample=sampled, max_new_tokens=12, pad_token_id=0
    )
    return [*made[:, longest:]]


def test_an_answer_does_not_depend_on_the_other_requests() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, pad_token_id=0, eos_token_id=None)).eval()
    one, other = [5, 6, 7], [8, 9, 10, 11, 12]
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}
    (alone,) = answers(model, [one], [7], **options)
    assert torch.equal(answers(model, [other, one], [3, 7], **options)[1], alone)
    assert torch.equal(answers(model, [one, one], [7, 8], **options)[0], alone)
    assert not torch.equal(answers(model, [one], [8], **options)[0], alone)
    assert torch.equal(answers(model, [one], [7], sampled=False, **options)[0], alone)  # it needs no torch.multinomial
    torch.manual_seed(99)  # nor torch's generator
    assert torch.equal(answers(model, [one], [7], **options)[0], alone)


def test_a_processor_has_the_answer_again_whatever_came_before() -> None:
    draw, scores = seeded_sampling(1, 3), torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    for position in (0, 1, 2, 0, 2):
        drawn = draw(torch.zeros(2, 3 + position, dtype=torch.long), scores)
        assert torch.equal(drawn.argmax(-1), fusedops.sample(scores, seed=1, position=position))
        assert drawn.isfinite().sum(-1).tolist() == [1, 1]


def test_a_row_without_a_token_is_an_error_of_the_draw() -> None:
    """Not a draw by torch's generator. As of scores with NaN, and of a temperature that a tensor may have."""
    draw = seeded_sampling(1, 1, temperature=torch.tensor([1.0, -1.0]))
    drawn = draw(torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 50))
    assert drawn.isfinite().sum(-1).tolist() == [1, 0]
    with pytest.raises(RuntimeError, match="nan"):
        torch.multinomial(drawn.softmax(-1), 1)

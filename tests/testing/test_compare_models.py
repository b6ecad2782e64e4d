"""compare_models on a small Llama: what it finds, and where."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import llama
from torch import Tensor

from fusedops import linear_log_probs, sample
from fusedops.errors import InvalidInputError
from fusedops.integrations.transformers import apply
from fusedops.testing import compare_models

IDS = torch.arange(3, 25).view(2, 11)


def at_once(model: Any, batch: Any) -> Tensor:
    return model(**batch).logits


def one_by_one(model: Any, batch: Any) -> Tensor:
    """Compute the logits by a prompt of 4 tokens, and the others one at a time."""
    cache, parts = None, []
    for ids in (batch["input_ids"][:, :4], *batch["input_ids"][:, 4:].split(1, 1)):
        done = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = done.past_key_values
        parts.append(done.logits)
    return torch.cat(parts, 1)


def applied() -> Any:
    model = llama()
    apply(model)
    return model


def test_a_model_is_equal_to_its_copy() -> None:
    model = llama()
    found = compare_models(model, copy.deepcopy(model), [{"input_ids": IDS}])
    assert found.largest == found.mean == 0
    assert found.first_layer() is None
    assert found.tokens.shape == (20, 3)
    logits = model(input_ids=IDS).logits.detach().double()
    want = torch.log_softmax(logits, -1)[1, 6, IDS[1, 7]]
    (at,) = (found.tokens == torch.tensor([0, 1, 7])).all(1).nonzero()
    torch.testing.assert_close(found.logp[0, at], want[None], rtol=0, atol=1e-6)


def test_the_first_module_that_differs_is_named() -> None:
    a, b = llama(), llama()
    with torch.no_grad():
        b.model.layers[1].mlp.up_proj.weight.add_(0.01)
    found = compare_models(a, b, [{"input_ids": IDS}])
    first = found.first_layer()
    assert first is not None
    assert first.name == "model.layers.1.mlp.up_proj"
    assert 0 < found.mean <= found.largest
    assert "first module     model.layers.1.mlp.up_proj: " in str(found)
    assert found.first_layer(1e6) is None


def test_a_nan_is_the_largest_difference() -> None:
    a, b = llama(), llama()
    with torch.no_grad():
        b.lm_head.weight[5].fill_(torch.nan)
    found = compare_models(a, b, [{"input_ids": IDS}])
    assert found.largest != found.largest
    first = found.first_layer()
    assert first is not None
    assert first == ("lm_head", torch.inf, first.size)


@pytest.mark.parametrize("run", [at_once, (at_once, one_by_one)], ids=["at once", "decode after prefill"])
def test_an_applied_model_is_near(run: Any) -> None:
    found = compare_models(llama(), applied(), [{"input_ids": IDS}, {"input_ids": IDS + 40}], run=run)
    assert 0 < found.largest < 1e-5
    assert found.tokens[:, 0].unique().tolist() == [0, 1]
    assert len(found.layers) > 20 if run is at_once else not found.layers


def test_the_log_probs_of_drawn_tokens_are_those_of_a_trainer() -> None:
    """An engine draws a token at a time, a trainer has the whole: the comparison finds the numbers of both."""
    model, ids, drawn = applied(), IDS[:, :4], list[Tensor]()
    for position in range(7):
        scores = model(input_ids=ids).logits[:, -1]
        token, logp = sample(scores, top_p=0.9, seed=torch.tensor([1, 2]), position=position, return_log_prob=True)
        ids, drawn = torch.cat([ids, token[:, None]], 1), [*drawn, logp]
    found = compare_models(model, model, [{"input_ids": ids}], run=(at_once, one_by_one))
    trainer, engine = found.logp[:, found.tokens[:, 2] >= 4].view(2, 2, 7).float()
    torch.testing.assert_close(torch.stack(drawn, 1), engine, atol=1e-5, rtol=0)
    hidden = model.model(input_ids=ids).last_hidden_state[:, 3:-1]
    torch.testing.assert_close(linear_log_probs(hidden, model.lm_head.weight, ids[:, 4:]), trainer, atol=1e-6, rtol=0)
    assert found.largest < 1e-5


def test_padding_does_not_count() -> None:
    model = applied()
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), IDS], 1)
    mask = torch.ones_like(padded).index_fill(1, torch.arange(3), 0)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    batch = {"input_ids": padded, "attention_mask": mask, "position_ids": positions}

    def alone(model: Any, batch: Any) -> Tensor:
        logits = model(input_ids=IDS).logits
        return torch.cat([logits.new_zeros(2, 3, logits.shape[-1]), logits], 1)

    found = compare_models(model, model, [batch], run=(alone, at_once))
    assert found.logp.shape == (2, 20)
    assert found.tokens[:, 2].min() == 4
    assert found.largest < 1e-5


def test_the_data_and_the_picture(tmp_path: Path) -> None:
    found = compare_models(llama(), applied(), [{"input_ids": IDS}])
    data = json.loads(json.dumps(found.to_dict()))
    assert data["largest"] == found.largest
    assert [each["name"] for each in data["layers"]][:3] == ["", "model", "model.embed_tokens"]
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("batch", "run", "text"),
    [
        ({}, at_once, "got a batch without input_ids"),
        ({"input_ids": IDS}, lambda model, batch: at_once(model, batch)[:, -1:], r"got logits of shape \(2, 1, 96\)"),
    ],
)
def test_what_is_refused(batch: Any, run: Callable[..., Tensor], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        compare_models(llama(), llama(), [batch], run=run)

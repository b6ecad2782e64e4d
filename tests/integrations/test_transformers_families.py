"""Models of many families of transformers with fusedops: logits, gradients, tokens, and the way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_families import FAMILIES, Family
from repository import DOCS, load
from torch import Tensor

from fusedops.integrations.transformers import apply

make_transformers = load(DOCS / "make_transformers.py")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def outputs(model: Any, family: Family) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits of a padded batch, without those of padding, and the gradients of the parameters."""
    model.zero_grad()
    inputs = family.inputs()
    logits = model(**inputs).logits
    if "attention_mask" in inputs and "decoder_input_ids" not in inputs:
        logits = logits[inputs["attention_mask"].bool()]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    (logits * weights).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def tokens(model: Any, family: Family) -> Tensor:
    """The tokens that follow the padded batch."""
    inputs = {name: value for name, value in family.inputs().items() if name != "decoder_input_ids"}
    with torch.no_grad():
        return model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)


def state(model: Any) -> dict[str, Any]:
    """What remove() has to bring back: the class and the attributes of each module."""
    modules = {name: (type(module), sorted(vars(module))) for name, module in model.named_modules()}
    return {**modules, "config": (model.config.to_dict(), model.config._attn_implementation)}


LISTED = make_transformers.listed((DOCS / "transformers.md").read_text("utf-8"))
# the first family for which the page has these ops; the others are slow in all
FIRST = {outcome.ops: name for name, outcome in reversed(LISTED.items())}.values()
EACH = [pytest.param(family, marks=[pytest.mark.slow] * (name not in FIRST)) for name, family in FAMILIES.items()]


@pytest.mark.parametrize("family", EACH, ids=FAMILIES)
def test_a_family_computes_the_same(family: Family) -> None:
    model = family.build()
    before, own_state = state(model), {name: value.clone() for name, value in model.state_dict().items()}
    logits, gradients = outputs(model, family)
    generated = tokens(model, family) if family.generates else None

    applied = apply(model)
    assert applied.ops
    assert LISTED[family.name] == make_transformers.outcome(applied), "stale: run `make docs`"
    applied_logits, applied_gradients = outputs(model, family)
    torch.testing.assert_close(applied_logits, logits, rtol=1e-4, atol=2e-5)
    assert applied_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(applied_gradients[name], gradient, rtol=1e-3, atol=1e-5 * max(scale, 1.0))
    if generated is not None:
        assert torch.equal(tokens(model, family), generated)
    assert list(model.state_dict()) == list(own_state)
    assert all(torch.equal(value, own_state[name]) for name, value in model.state_dict().items())

    applied.remove()
    assert state(model) == before
    again, gradients_again = outputs(model, family)
    assert torch.equal(again, logits)
    assert all(torch.equal(gradients_again[name], gradient) for name, gradient in gradients.items())


def test_the_page_has_these_families_and_no_other() -> None:
    text = (DOCS / "transformers.md").read_text("utf-8")
    assert sorted(LISTED) == sorted(family.name for family in FAMILIES.values())
    lists = make_transformers.lists({name: LISTED[name] for name in FAMILIES})
    assert make_transformers.page(lists) == text, "stale: run `make docs`"


def test_the_lists_are_read_as_they_are_written() -> None:
    outcomes = {
        "One": make_transformers.Outcome(("attention", "swiglu"), ()),
        "Two 2.0": make_transformers.Outcome(("rms_norm",), ("`MLP`: it takes a, b", "`Norm`: no weight")),
        "Three": make_transformers.Outcome(("attention", "swiglu"), ()),
    }
    page = f"a\n{make_transformers.START}{make_transformers.lists(outcomes)}{make_transformers.END}b"
    assert make_transformers.listed(page) == outcomes
    assert "- **One, Three**: attention, swiglu\n" in page

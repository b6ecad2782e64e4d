"""Models of many families of transformers with fusedops: logits, gradients, tokens, and the way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from model_families import FAMILIES, Family
from model_family import accuracy, result
from repository import DOCS, load
from torch import Tensor

from fusedops.integrations.transformers import apply

make = load(DOCS / "make.py")
families = load(DOCS / "parts" / "families.py")
PAGE = (DOCS / "families.md").read_text("utf-8")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def outputs(model: Any, family: Family) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits or hidden states of a padded batch, without those of padding, and the gradients of the parameters."""
    model.zero_grad()
    logits = result(model, family)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    (logits * weights).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def tokens(model: Any, family: Family) -> Tensor:
    """The tokens that follow the padded batch."""
    inputs = {name: value for name, value in family.inputs().items() if name != "decoder_input_ids"}
    with torch.no_grad():
        return model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)


def state(model: Any) -> dict[str, Any]:
    """What remove() has to bring back: the class and the attributes of each module."""
    modules = {name: (type(module), sorted(vars(module))) for name, module in model.named_modules()}
    return {**modules, "config": (model.config.to_dict(), model.config._attn_implementation)}


LISTED = families.listed(make.block(PAGE, "families"))
IS_OF_THE_PAGE = f"in transformers {transformers.__version__}." in PAGE  # another release has other modules
# the first family for which the page has these ops; the others are slow in all
FIRST = {outcome.ops: name for name, outcome in reversed(LISTED.items())}.values()
EACH = [pytest.param(family, marks=[pytest.mark.slow] * (name not in FIRST)) for name, family in FAMILIES.items()]


@pytest.mark.parametrize("family", EACH, ids=FAMILIES)
def test_a_family_computes_the_same(family: Family) -> None:
    model = family.build()
    own_state = {name: value.clone() for name, value in model.state_dict().items()}
    logits, gradients = outputs(model, family)
    generated = tokens(model, family) if family.generates else None
    before = state(model)  # a router of Switch sets attributes in its forward

    applied = apply(model)
    assert applied.ops
    if IS_OF_THE_PAGE:
        assert LISTED[family.name] == families.outcome(applied), "stale: run `make docs`"
    applied_logits, applied_gradients = outputs(model, family)
    torch.testing.assert_close(applied_logits, logits, rtol=1e-4, atol=2e-5)
    assert applied_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = float(gradient.abs().max()) if gradient.numel() else 1.0  # a bottleneck of size 0
        torch.testing.assert_close(applied_gradients[name], gradient, rtol=1e-3, atol=1e-5 * max(scale, 1.0))
    if generated is not None:
        assert torch.equal(tokens(model, family), generated)
    assert list(model.state_dict()) == list(own_state)
    assert all(torch.equal(value, own_state[name]) for name, value in model.state_dict().items())

    applied.remove()
    assert state(model) == before
    assert torch.equal(result(model, family), logits)  # with gradients, as before: torch's attention differs without

    # measured: at most 3e-7 of the largest value in float32. In bfloat16 applied and plain differ from float32 by the
    # same, and from one another by up to 1.6 times that, where it is one step of the largest logit or two
    largest = torch.median if family.chooses else torch.amax
    changed = accuracy(model, family, apply, wide=(logits, applied_logits), largest=largest)
    assert changed.float32 <= 1e-6 * max(changed.size, 5.0)
    assert changed.bfloat16 <= 1.5 * changed.plain + 2**-7 * changed.size


def test_the_page_has_these_families_and_no_other() -> None:
    assert sorted(LISTED) == sorted(family.name for family in FAMILIES.values())
    lists, rows = make.block(PAGE, "families"), families.tabled(make.block(PAGE, "accuracy"))
    assert families.lists({name: LISTED[name] for name in FAMILIES}) == lists, "stale: run `make docs`"
    assert sorted(rows) == sorted(FAMILIES), "stale: run `make docs`"
    assert families.table(rows) == make.block(PAGE, "accuracy")


def test_the_page_has_a_plan_of_each_family() -> None:
    text = make.block(PAGE, "plans")
    found = families.planned(text)
    assert sorted(found) == sorted(FAMILIES), "stale: run `make docs`"
    assert families.plans_block(text) == text


@pytest.mark.skipif(not IS_OF_THE_PAGE, reason="another release of transformers")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("Llama", "T5"))) for name in FAMILIES]
)
def test_a_plan_is_as_on_the_page(name: str) -> None:
    ops, cell = families.planned(make.block(PAGE, "plans"))[name]
    (plan,) = families.plans(FAMILIES[name], ["A2"])  # the CPU is the page's, and triton is interpreted in tests
    assert (", ".join(sorted(families.unfused(plan))) or "none") == ops, "stale: delete its row, and run `make docs`"
    assert cell.removeprefix(name).split()[2] == f"{100 * plan.share['bytes']:.0f}"


def test_the_lists_are_read_as_they_are_written() -> None:
    outcomes = {
        "One": families.Outcome(("attention", "swiglu"), ()),
        "Two 2.0": families.Outcome(("rms_norm",), ("`MLP`: it takes a, b", "`Norm`: no weight")),
        "Three": families.Outcome(("attention", "swiglu"), ()),
    }
    lists = families.lists(outcomes)
    assert families.listed(lists) == outcomes
    assert "- **One, Three**: attention, swiglu\n" in lists

"""The table of docs/transformers.md that compare_models measures: its families, and what some of them give here."""

from __future__ import annotations

import pytest
from model_families import FAMILIES
from model_parity import WAYS, has_tokens, parity
from repository import DOCS, load

make_parity = load(DOCS / "make_parity.py")
PAGE = (DOCS / "transformers.md").read_text("utf-8")
ROWS = make_parity.listed(PAGE)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_the_table_has_the_families_that_give_tokens() -> None:
    assert list(ROWS) == [name for name, family in FAMILIES.items() if has_tokens(family)]
    assert make_parity.with_table(PAGE, ROWS) == PAGE


def test_no_number_of_float32_is_far_from_rounding() -> None:
    """Where no router or indexer chooses: of two nearly equal experts either may be taken. Bamba's decode is off."""
    for name, row in ROWS.items():
        for way, numbers in zip(WAYS, row):
            if (
                numbers is not None
                and "bfloat16" not in way
                and not FAMILIES[name].chooses
                and (name, way) != ("Bamba", "decode")
            ):
                assert numbers[0] <= 1e-5, (name, way)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "Qwen3-Next", "BERT", "T5"])
def test_the_numbers_have_the_size_of_those_here(name: str) -> None:
    least = {way: 2e-2 if "bfloat16" in way else 2e-6 for way in WAYS}  # a rounding step of the largest logits
    for (way, found), numbers in zip(parity(FAMILIES[name]).items(), ROWS[name]):
        assert (found is None) is (numbers is None), way
        if found is not None:
            for here, there in zip((found.largest, found.mean), numbers):
                assert here <= max(10 * there, least[way]), way
                assert there <= max(10 * here, least[way]), way

"""Two ways to the same token: what compare_models finds between them, for families of each kind."""

from __future__ import annotations

import pytest
from model_families import FAMILIES
from model_parity import parity

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "Qwen3-Next", "BERT", "T5"])
def test_no_way_is_far_from_rounding(name: str) -> None:
    """Measured: at most 1e-6 in float32, and 5e-2 in bfloat16."""
    found = parity(FAMILIES[name])
    assert any(found.values())
    for way, comparison in found.items():
        if comparison is not None:
            assert comparison.largest <= (0.2 if "bfloat16" in way else 1e-5), way

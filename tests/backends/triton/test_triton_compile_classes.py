"""The compiled Triton kernel of linear_cross_entropy, as ``test_triton_compile.py`` has them for the first ops."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="triton is not installed: nothing to compile with")

Case = dict[str, Any]


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for at, target in enumerate(("sm_80", "sm_90", "sm_100", "gfx942")):
        for turn, dtype in enumerate(("bfloat16", "float32", "float64"), at):
            plain = {"op": "classes", "shape": [512, 128256], "dtype": dtype, "target": target}
            # in turn on the other targets than sm_90
            if target == "sm_90" or turn % 2:
                cases[f"plain-{dtype}-{target}"] = {**plain, "options": False}
            if target == "sm_90" or not turn % 2:
                cases[f"options-{dtype}-{target}"] = {**plain, "bias": True, "scale": True}
    sm_90 = {"op": "classes", "dtype": "bfloat16", "target": "sm_90"}
    cases["odd"] = {**sm_90, "shape": [512, 50257]}  # rows of logits are padded: 16-byte accesses all the same
    cases["few"] = {**sm_90, "shape": [512, 1000]}
    cases["loss alone"] = {**sm_90, "shape": [512, 32000], "gradient": False}
    cases["2**37 logits"] = {**sm_90, "shape": [1 << 20, 1 << 17]}
    return cases


CASES = _cases()


@pytest.mark.parametrize("name", CASES)
def test_compiles_well(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    case, facts = CASES[name], compiled[name]
    assert facts["spilled"] == 0
    assert facts["registers"] * facts["warps"] * (64 if case["target"] == "gfx942" else 32) <= 2**16
    assert facts["float64"] == (case["dtype"] == "float64")
    assert facts["address_64"]
    # the rows of logits by 16 bytes; beside them the target, its logit and the loss, of one element each
    wide, narrow = facts["loads"].pop("16"), facts["loads"]
    assert wide >= (1 if case.get("gradient") is False else 2)
    assert sum(narrow.values()) <= 6, facts
    if case.get("gradient", True):
        assert facts["stores"]["16"] >= 1
    assert sum(count for width, count in facts["stores"].items() if width != "16") <= 1, facts

"""The compiled Triton kernels of cross entropy, as ``test_triton_compile.py`` has them for the first ops."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="triton is not installed: nothing to compile with")

Case = dict[str, Any]
OTHERS = ("sm_80", "sm_100", "gfx942")  # than sm_90, which has every case
OPS = ("cross_entropy", "cross_entropy backward")


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for op in OPS:
        for dtype, width, target in (
            ("bfloat16", 128256, "sm_90"),
            ("bfloat16", 256000, "sm_90"),
            ("bfloat16", 1000, "sm_90"),  # 1000 * 2 bytes is a multiple of 16, though 1000 is not one of 16
            ("bfloat16", 64, "sm_90"),
            ("float16", 32000, "sm_90"),
            ("float64", 32000, "sm_90"),
            ("float32", 128256, "sm_90"),
            *((dtype, 128256, target) for dtype in ("bfloat16", "float32") for target in OTHERS),
        ):
            # in turn on the other targets: with options and without, for 16 and 32 bits
            turn = ((OTHERS.index(target) + (dtype == "float32")) % 2 == 1,) if target in OTHERS else (False, True)
            for options in turn:
                case = {"op": op, "shape": [8192, width], "dtype": dtype, "target": target, "options": options}
                cases[f"{op}-{width}-{dtype}-{target}{'-options' * options}"] = case
        huge = {"op": op, "shape": [1 << 22, 128256], "dtype": "bfloat16", "target": "sm_90"}
        cases[f"{op}-2**39 elements"] = huge
        cut = {"op": op, "shape": [8192, 50257], "padded": 50304, "dtype": "bfloat16", "target": "sm_90"}
        cases[f"{op}-cut out of a padded vocabulary"] = cut
    return cases


CASES = _cases()


@pytest.mark.parametrize("name", CASES)
def test_compiles_well(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    case, facts = CASES[name], compiled[name]
    assert facts["spilled"] == 0
    assert facts["float64"] == (case["dtype"] == "float64")
    assert facts["address_64"]
    assert facts["kernel"] == ("_backward" if case["op"].endswith("backward") else "_forward")
    if not case["target"].startswith("gfx") and "padded" not in case:
        # target, lse and the like are scalars of 8 and 4 bytes
        assert "16" in facts["loads"], facts
        assert not {"2", "1"} & set(facts["loads"]) - _wanted_logit(case), facts
        if case["op"].endswith("backward"):
            assert set(facts["stores"]) == {"16"}, facts


def _wanted_logit(case: Case) -> set[str]:
    """Return the width of the one access of forward that reads the logit of the target."""
    return set() if case["op"].endswith("backward") else {{"float64": "8", "float32": "4"}.get(case["dtype"], "2")}

"""The compiled Triton kernels of the gated activations, as ``test_triton_compile.py`` has them for the first ops."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="triton is not installed: nothing to compile with")

Case = dict[str, Any]
FORMS = ("swiglu", "swiglu_halves", "swiglu_pairs", "geglu", "geglu_halves", "geglu_pairs")
OTHERS = ("sm_80", "sm_100", "gfx942")  # than sm_90, which has every case
OPS = tuple(f"{op}{side}" for op in FORMS for side in ("", "_backward"))


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for at, op in enumerate(OPS):
        for dtype, width, target in (
            ("bfloat16", 14336, "sm_90"),
            ("bfloat16", 1000, "sm_90"),  # 1000 * 2 bytes is a multiple of 16, though 1000 is not one of 16
            ("bfloat16", 64, "sm_90"),
            ("float32", 4096, "sm_90"),
            # in turn, by op and direction
            (("float16", 2880), ("float64", 4096))[(at + at // 2) % 2] + ("sm_90",),
            *((("bfloat16", "float32")[(at + turn) % 2], 11008, target) for turn, target in enumerate(OTHERS)),
        ):
            case = {"op": op, "shape": [8192, width], "dtype": dtype, "target": target}
            cases[f"{op}-{width}-{dtype}-{target}"] = case
        if "swiglu" in op:
            clamped = {"op": op, "shape": [8192, 2880], "dtype": "bfloat16", "target": "sm_90", "limit": 7.0}
            cases[f"{op}-clamped"] = clamped
        huge = {"op": op, "shape": [1 << 26, 4096], "dtype": "bfloat16", "target": "sm_90"}
        cases[f"{op}-2**38 elements"] = huge
    return cases


CASES = _cases()


@pytest.mark.parametrize("name", CASES)
def test_compiles_well(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    case, facts = CASES[name], compiled[name]
    assert facts["spilled"] == 0
    assert facts["registers"] <= 128  # at 128 threads: four programs on a multiprocessor, or more
    assert facts["float64"] == (case["dtype"] == "float64")
    assert facts["address_64"]
    assert facts["kernel"].startswith("_backward" if case["op"].endswith("backward") else "_forward")
    assert set(facts["loads"]) == set(facts["stores"]) == {"16"}, facts

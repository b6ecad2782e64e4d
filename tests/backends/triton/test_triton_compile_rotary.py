"""The compiled Triton kernel of rotary_embedding, as ``test_triton_compile.py`` has them for the first ops."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="triton is not installed: nothing to compile with")

Case = dict[str, Any]
LLAMA = {"q": [4, 32, 2048, 128], "k": [4, 8, 2048, 128], "cos": [2048, 64]}
PARTIAL = {**LLAMA, "cos": [2048, 32], "interleaved": True}
SHAPES: dict[str, Case] = {
    "llama": LLAMA,
    "partial": {**LLAMA, "cos": [2048, 32]},
    "interleaved": {**LLAMA, "interleaved": True},
    "partial interleaved": PARTIAL,
    "bsnd": {"q": [4, 2048, 32, 128], "k": [4, 2048, 8, 128], "cos": [4, 2048, 64], "seq_dim": -3},
}
MORE: dict[str, Case] = {
    "decode": {"q": [64, 64, 1, 64], "k": [64, 8, 1, 64], "cos": [64, 1, 32]},
    "heads of 80": {"q": [4, 32, 2000, 80], "k": [4, 8, 2000, 80], "cos": [2000, 40]},  # a multiple of 8, not of 16
    "q alone": {"q": [4, 32, 2048, 128], "cos": [2048, 64]},
    "wide heads": {"q": [4, 2, 2048, 8192], "k": [4, 2, 2048, 8192], "cos": [2048, 4096]},
    "2**38 elements": {"q": [64, 1024, 32768, 128], "k": [64, 8, 32768, 128], "cos": [32768, 64]},
}


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for op in ("rotary_embedding", "rotary_embedding backward"):
        for name, shape in {**SHAPES, **MORE}.items():
            case = {"op": op, "dtype": "bfloat16", "angles": "float32", "target": "sm_90", **shape}
            cases[f"{op}, {name}"] = case
    for turn, (name, shape) in enumerate(SHAPES.items()):
        for dtype in ("bfloat16", "float32"):
            cases[f"{name}, {dtype}, sm_90"] = {"op": "rotary_embedding", "dtype": dtype, "target": "sm_90", **shape}
        for at, target in enumerate(("sm_80", "sm_100", "gfx942"), turn):  # 16 and 32 bits in turn
            dtype = ("bfloat16", "float32")[at % 2]
            cases[f"{name}, {dtype}, {target}"] = {
                "op": "rotary_embedding", "dtype": dtype, "target": target, **shape
            }  # fmt: skip
        cases[f"{name}, float64"] = {"op": "rotary_embedding", "dtype": "float64", "target": "sm_90", **shape}
    return cases


CASES = _cases()


@pytest.mark.parametrize("name", CASES)
def test_compiles_well(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    case, facts = CASES[name], compiled[name]
    assert facts["kernel"] == "_rotate"
    assert facts["spilled"] == 0
    # at 128 threads: 8 programs on a multiprocessor, or more; a lane of gfx942 has 128 registers with 4 waves
    assert facts["registers"] <= (128 if case["target"] == "gfx942" else 64), facts
    assert facts["float64"] == (case["dtype"] == "float64")
    assert facts["address_64"]
    assert set(facts["loads"]) == set(facts["stores"]) == {"16"}, facts

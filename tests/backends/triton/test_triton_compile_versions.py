"""A kernel of each op and direction, compiled ahead of time: what every supported version of Triton must compile.

Of ``make test-versions``. The other ``test_triton_compile`` files are about the newest version: more sizes, registers,
spills, and AMD GPUs, for which old versions need a linker that their wheel does not have. Each case here is one of
theirs, or of the costs: in a run of all of them it is compiled once.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="triton is not installed: nothing to compile with")

Case = dict[str, Any]
ROTARY: Case = {"q": [4, 32, 2048, 128], "k": [4, 8, 2048, 128], "cos": [2048, 64], "angles": "float32"}
LINEAR_ATTENTION: Case = {"shape": [1, 4096, 16, 32, 128, 128]}
ROWS: dict[str, Case] = {
    "forward": {"shape": [4, 8, 128, 1024], "mask": [4, 1, 128, 1024]},
    "backward": {"shape": [4, 8, 128, 1024], "causal": True},
    **{name: {"shape": [8192, 4096]} for name in ("gelu", "gelu_backward", "dropout_add", "dropout_backward")},
    "add_rms_norm": {"shape": [8192, 32768]},
    "add_rms_norm backward": {"shape": [8192, 4096]},
    "layer_norm": {"shape": [8192, 65536]},  # more than fits on chip
    "layer_norm backward": {"shape": [8192, 1000]},
    "gated_rms_norm": {"shape": [8192, 4096], "gate_first": True, "groups": 8},
    "gated_rms_norm backward": {"shape": [8192, 4096], "gate_first": True, "groups": 8, "dtype": "float32"},
    "causal_conv1d": {"shape": [2, 4096, 4096], "by_channel": True},
    "causal_conv1d backward": {"shape": [1, 8192, 16384], "by_channel": True, "packed": 33, "states": True},
    "swiglu": {"shape": [8192, 4096], "limit": 7.0},
    "geglu_halves_backward": {"shape": [8192, 11008]},
    "rotary_embedding": ROTARY,
    "rotary_embedding backward": {**ROTARY, "interleaved": True},
    "cross_entropy": {"shape": [2048, 128256], "options": True, "dtype": "float32"},
    "cross_entropy backward": {"shape": [2048, 32000]},
    "classes": {"shape": [2048, 32000], "gradient": True},
    "experts": {"shape": [4096, 128, 8, 2048, 768], "bias": True, "launch": 4},
    "experts backward": {"shape": [4096, 128, 8, 2048, 768], "bias": True, "launch": 4},
    "sample": {"shape": [64, 151936], "mask": True, "log_prob": "unfiltered", "dtype": "float32"},
    "linear_attention": {**LINEAR_ATTENTION, "launch": 1},
    "linear_attention backward": {**LINEAR_ATTENTION, "launch": 3},
}
TARGETS = {"forward": "sm_100", "add_rms_norm": "sm_80", "cross_entropy": "sm_80"}
CASES = {op: {"op": op, "dtype": "bfloat16", "target": TARGETS.get(op, "sm_90"), **case} for op, case in ROWS.items()}
#: Products by copies from memory to memory on the chip: of experts, forward and of the gradient of a weight, and of the
#: chunks of linear_attention.
PRODUCTS: dict[str, Case] = {
    f"{op}, {dtype}": {
        "op": op,
        "dtype": dtype,
        "target": "sm_90",
        "shape": [4096, 128, 8, 2048, 768],
        "launch": launch,
    }
    for op, launch in (("experts", 3), ("experts backward", 5))
    for dtype in ("bfloat16", "float32")
}
PRODUCTS["linear_attention, parts"] = {**CASES["linear_attention"], "launch": 0}
#: Blocks of packed weights begin at multiples of two bytes.
PACKED: dict[str, Case] = {
    f"quantized_linear, {rows}, {packed}": {
        "op": "quantized_linear",
        "dtype": "bfloat16",
        "target": "sm_90",
        "shape": [rows, 4096, 4096],
        "format": packed,
    }
    for rows in (1, 512)
    for packed in ("Q8_0", "NVFP4", "FP8_BLOCK")
}
PACKED["int8_linear"] = {"op": "int8_linear", "dtype": "bfloat16", "target": "sm_90", "shape": [512, 4096, 4096]}
CASES |= PRODUCTS | PACKED


@pytest.mark.parametrize("name", CASES)
def test_it_compiles(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    facts = compiled[name]
    assert facts["address_64"]
    assert not facts["float64"]
    assert not facts["overflows"]
    # four channels of causal_conv1d are 8 bytes, and in its backward with states taps begin anywhere
    assert "16" in facts["loads"] or name in PRODUCTS | PACKED or name.startswith("causal_conv1d")
    assert facts["stores"]

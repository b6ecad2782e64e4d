"""The compiled Triton kernels of tensors of more than 2**31 elements: no product of 32 bits that does not fit in them.

A size or a step is an argument of 32 bits where it fits. The other ``test_triton_compile`` files have the sizes of
models.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="triton is not installed: nothing to compile with")

Case = dict[str, Any]
ROWS, HEADS = [2**22, 8192], [64, 64, 65536, 128]
EXPERTS: Case = {"shape": [2**20, 16, 16, 2048, 4096], "bias": True}
LINEAR_ATTENTION: Case = {"shape": [8, 2**18, 16, 32, 128, 128]}
LARGE: dict[str, list[Case]] = {
    "forward": [
        {"shape": [16, 64, 65536, 4096], "mask": [16, 1, 65536, 4096]},
        {"shape": [2, 2**31 - 2**16]},
        {"shape": [2**16, 65536]},
    ],
    "backward": [{"shape": [16, 64, 65536, 4096]}, {"shape": [2, 2**31 - 2**16]}, {"shape": [2**18, 32768]}],
    **{
        op: [{"shape": ROWS}, {"shape": ROWS, "bias": None}]
        for op in ("gelu", "gelu_backward", "dropout", "dropout_add", "dropout_backward")
    },
    "add_layer_norm": [{"shape": ROWS}, {"shape": [4, 2**31 - 2**16]}],
    "add_layer_norm backward": [{"shape": ROWS}, *({"shape": [2**18, 2**17], "launch": at} for at in (0, 1))],
    "gated_rms_norm": [{"shape": ROWS, "groups": 4}],
    "gated_rms_norm backward": [{"shape": ROWS, "groups": 4}],
    "merge_attention": [{"shape": [64, 65536, 64, 128]}],
    "merge_attention backward": [{"shape": [64, 65536, 64, 128]}],
    **{
        f"swiglu{form}": [{"shape": ROWS}]
        for form in ("", "_backward", "_halves", "_halves_backward", "_pairs", "_pairs_backward")
    },
    "rotary_embedding": [{"q": HEADS, "k": HEADS, "cos": [65536, 64]}],
    "classes": [{"shape": [2**20, 2**17], "bias": True}],
    "cross_entropy": [{"shape": [2**22, 128256], "options": True}],
    "cross_entropy backward": [{"shape": [2**22, 128256], "options": True}],
    "linear_log_probs": [{"shape": [2**20, 2**17]}],
    "linear_log_probs backward": [{"shape": [2**20, 2**17]}],
    "top_k_routing": [{"shape": [2**26, 256], "k": 8}],
    "top_k_routing backward": [{"shape": [2**26, 256], "k": 8}],
    "causal_conv1d": [
        {"shape": [2, 8192, 2**18], "by_channel": True},
        {"shape": [2, 8192, 2**18]},
        {"shape": [2, 8192, 2**18], "states": True},
        {"shape": [1, 8192, 2**19], "by_channel": True, "packed": 9},
    ],
    "causal_conv1d backward": [
        {"shape": [2, 8192, 2**18], "by_channel": channels, "states": True, "launch": at}
        for channels in (True, False)
        for at in (0, 2)
    ],
    "quantized_linear": [
        {"shape": [rows, 2**16, 2**17], "format": packed}
        for rows, packed in ((1, "Q8_0"), (2**16, "Q4_0"), (1, "FP8_ROW"), (2**16, "NVFP4"), (2**16, "NF4"))
    ],
    "experts": [{**EXPERTS, "launch": at} for at in range(5)],
    "experts backward": [{**EXPERTS, "launch": at} for at in range(2, 9)],
    "linear_attention": [{**LINEAR_ATTENTION, "launch": at} for at in range(2)],
    "linear_attention backward": [{**LINEAR_ATTENTION, "launch": at} for at in range(2, 6)],
}
CASES = {
    f"{op}, {at}": {"op": op, "dtype": "bfloat16", "target": "sm_90", "overflows": True, **case}
    for op, cases in LARGE.items()
    for at, case in enumerate(cases)
}


@pytest.mark.parametrize("name", CASES)
def test_no_product_of_32_bits_overflows(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["overflows"] == []

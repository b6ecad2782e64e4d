"""The compiled Triton kernels of experts. As ``test_triton_compile.py`` has them for the first ops."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="triton is not installed: nothing to compile with")

Case = dict[str, Any]
SPILL_NOISE = 16  # bytes a thread, as in ``test_triton_compile.py``
OTHERS = ("sm_80", "sm_100", "gfx942")  # than sm_90, which has every case
FORWARD = ("_count", "_place", "_sorted", "_rows", "_combine")
FEW = ("_few", "_few", "_combine")
#: The activation of what torch has multiplied.
ACTIVATION = ("_count", "_place", "_forward")
#: With biases. The first two are those of the forward, and the sums and copies are twice the same.
BACKWARD = ("_count", "_place", "_spread", "_rows", "_backward", "_sum_groups", "_weights", "_sum_groups", "_rows")
QWEN3: Case = {"shape": [4096, 128, 8, 2048, 768]}
#: With 2**33 elements of up-projections, and more choices than are loaded at once.
LARGE: Case = {"shape": [2**20, 16, 16, 512, 256], "activation": "geglu"}
GPT_OSS: Case = {"shape": [4096, 32, 4, 2880, 2880], "bias": True, "interleaved": True, "transposed": True}
TOKEN: Case = {"shape": [1, 128, 8, 2048, 768]}
TOKENS: Case = {"shape": [32, 8, 2, 4096, 14336], "interleaved": True, "transposed": True}
ODD: Case = {"shape": [100, 16, 3, 37, 21], "bias": True, "activation": "relu2"}


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}

    def add(name: str, model: Case, dtype: str, target: str, kernels: tuple[str, ...] = ()) -> None:
        calls = {"experts": FORWARD, "experts backward": BACKWARD, "experts activation": ACTIVATION}
        few = {"experts few": FEW}
        for op, names in (calls if model["shape"][0] > 32 else few).items():
            for at, kernel in enumerate(names):
                repeated = " " in op and kernel in ("_count", "_place", "_combine")
                if repeated or (kernels and kernel not in kernels):
                    continue
                case = {"op": op, "dtype": dtype, "target": target, "launch": at, "kernel": kernel, **model}
                cases[f"{op}, {at}, {kernel}, {name}, {dtype}, {target}"] = {"bias": True, **case}

    add("qwen3", QWEN3, "bfloat16", "sm_90")
    # what the form of the weights, the activation and odd widths change
    add("gpt_oss", GPT_OSS, "float16", "sm_90", ("_sorted", "_forward", "_backward", "_rows"))
    add("large", LARGE, "bfloat16", "sm_90", ("_sorted", "_spread", "_backward"))
    add("odd", ODD, "float16", "sm_90", ("_sorted", "_backward", "_weights", "_combine"))
    add("token", TOKEN, "bfloat16", "sm_90")
    for target, dtype in zip(OTHERS, ("float16", "bfloat16", "float32")):
        add("qwen3", QWEN3, dtype, target)
        add("tokens", TOKENS, dtype, target)
    add("gpt_oss", GPT_OSS, "float16", "sm_100", ("_weights",))
    clear: Case = {"op": "experts clear", "launch": 0, "kernel": "_clear", "dtype": "bfloat16", **QWEN3}
    alone: Case = {"op": "experts alone", "launch": 1, "kernel": "_add_bias", "dtype": "bfloat16", **QWEN3}
    for at, target in enumerate(("sm_90", *OTHERS)):
        cases[f"clear, {target}"] = {**clear, "target": target}
        cases[f"alone, {target}"] = {**alone, "target": target, "bias": at % 2 == 0}
    return cases


CASES = _cases()


@pytest.mark.parametrize("name", CASES)
def test_compiles_well(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    case, facts = CASES[name], compiled[name]
    assert facts["kernel"] == case["kernel"]
    assert facts["spilled"] <= SPILL_NOISE
    assert not facts["float64"]
    assert not facts["overflows"]
    assert facts["address_64"]
    # two programs on a multiprocessor of an NVIDIA GPU, or more; an AMD one has twice the registers
    assert facts["registers"] * facts["warps"] <= 2**11, facts
    if case["kernel"] in ("_spread", "_forward", "_backward", "_combine") and case["shape"] != ODD["shape"]:
        # besides: places, experts and weights, once a row
        assert "16" in facts["loads"]
        assert "16" in facts["stores"]
        assert set(facts["loads"]) <= {"16", "8", "4", "2"}

"""The compiled Triton kernels of linear_attention. As ``test_triton_compile.py`` has them for the first ops."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="triton is not installed: nothing to compile with")

Case = dict[str, Any]
OTHERS = ("sm_80", "sm_100", "gfx942")  # than sm_90, which has every case
FORWARD = ("_chunk_parts", "_walk")
#: Of these, the first is that of the forward, the second is too but for what it writes, and the sums of heads are twice
#: the same.
BACKWARD = ("_chunk_parts", "_walk", "_walk_back", "_scores_back", "_chunk_back", "_sum_heads")
QWEN3_NEXT: Case = {"shape": [1, 4096, 16, 32, 128, 128]}
MAMBA2: Case = {"shape": [2, 4096, 1, 64, 128, 64], "plain": True}
PACKED: Case = {"shape": [1, 8192, 4, 4, 256, 256], "sequences": 9}
DECODE: Case = {"shape": [64, 1, 16, 32, 128, 128]}
#: Bytes of a thread that may spill: of bfloat16 with rows of up to 128, on GPUs whose tensor cores read operands from
#: memory on the chip; and elsewhere, which was not tuned.
SPILLS, MOST_SPILLS = 16, 2048
#: Of these kernels, on sm_90, Triton 3.9 spills more, which are addresses; 3.6 at most 8 of any kernel.
OF_KERNEL = {"_chunk_parts": 24, "_walk_back": 48}


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}

    def add(name: str, model: Case, dtype: str, target: str, kernels: tuple[str, ...] = ()) -> None:
        for op, names in (("linear_attention", FORWARD), ("linear_attention backward", BACKWARD)):
            for at, kernel in enumerate(names):
                once = FORWARD[:1] if (name, target) == ("qwen3_next", "sm_90") else FORWARD
                repeated = op.endswith("backward") and kernel in once
                if repeated or (kernels and kernel not in kernels):
                    continue
                case = {"op": op, "dtype": dtype, "target": target, "launch": at, "kernel": kernel, **model}
                cases[f"{op}, {kernel}, {name}, {dtype}, {target}"] = case

    add("qwen3_next", QWEN3_NEXT, "bfloat16", "sm_90")
    add("mamba2", MAMBA2, "bfloat16", "sm_90", ("_walk", "_chunk_back"))
    add("packed", PACKED, "bfloat16", "sm_90", ("_chunk_parts", "_walk_back"))
    for target, dtypes in zip(OTHERS, (("float16", "bfloat16"), ("bfloat16", "float16"), ("bfloat16", "float32"))):
        if target == "sm_100":
            add("qwen3_next", QWEN3_NEXT, dtypes[0], target)
        else:  # rows of 256 need the most registers and memory on the chip
            without = {"_chunk_back", *(["_walk"] if target == "sm_80" else [])}  # which is below, in float32
            add("qwen3_next", QWEN3_NEXT, dtypes[0], target, tuple({*FORWARD, *BACKWARD} - without))
            add("packed", PACKED, dtypes[1], target, ("_chunk_back",))
    add("qwen3_next", QWEN3_NEXT, "float32", "sm_80", ("_walk",))
    for at, target in enumerate(("sm_90", *OTHERS)):
        dtype = ("bfloat16", "float32")[at % 2]
        case = {"op": "linear_attention", "dtype": dtype, "target": target, "launch": 0, "kernel": "_steps", **DECODE}
        cases[f"decode, {dtype}, {target}"] = case
    return cases


CASES = _cases()


@pytest.mark.parametrize("name", CASES)
def test_compiles(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    case, facts = CASES[name], compiled[name]
    assert facts["kernel"] == case["kernel"]
    assert not facts["float64"]
    assert not facts["overflows"]
    assert facts["address_64"]
    assert facts["registers"] * facts["warps"] * (64 if case["target"] == "gfx942" else 32) <= 2**17
    if case["target"] == "sm_80":
        assert facts["shared"] <= 99 * 1024  # of a program on 8.6, 8.9 and 12.x
    if case["target"] == "sm_100":
        assert facts["chained"] == 0
    if case["kernel"] in ("_steps", "_sum_heads"):
        assert facts["spilled"] == 0
        assert "16" in facts["loads"]
    small = case["dtype"] == "bfloat16" and case["shape"][4] <= 128 and case["target"] in ("sm_90", "sm_100")
    if small and case["target"] == "sm_90" and case["kernel"].startswith("_walk"):
        assert facts["wgmma_of_registers"] == facts["wgmma"] > 0
    most = OF_KERNEL.get(case["kernel"], SPILLS) if case["target"] == "sm_90" else SPILLS
    assert facts["spilled"] <= (most if small else MOST_SPILLS), facts

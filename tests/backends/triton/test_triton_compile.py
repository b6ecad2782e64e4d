"""The compiled Triton kernels for sm_80, sm_90, sm_100 and gfx942, on a machine without any of them.

``triton_aot.py`` compiles, in a process of its own (see there). Read off the assembly: no spilled
registers, 16-byte accesses of global memory, 64-bit addresses, and no float64.
"""

from __future__ import annotations

from typing import Any

import pytest
from compiled_facts import compiled_facts, each, wanted
from fork_server import ForkServer

pytestmark = pytest.mark.slow
triton = pytest.importorskip("triton", reason="triton is not installed: nothing to compile with")

Case = dict[str, Any]

#: Bytes a thread. ptxas moves a register or two out by its own choice, to fit one more program on a multiprocessor (it
#: stops at 40 registers of 128 allowed): noise beside 128 bytes of real traffic. Past the limits it is 48 and more.
SPILL_NOISE = 16
WIDTHS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]  # the last is beyond what fits on chip
CORNERS = [64, 1024, 16384, 32768, 65536]
BETWEEN = [size_k for size_k in WIDTHS if size_k <= 8192 and size_k not in CORNERS]
DTYPES = ("bfloat16", "float32")
OTHERS = ("sm_80", "sm_100", "gfx942")  # than sm_90, which has every case


def _case(op: str, size_k: int, dtype: str, target: str, **more: Any) -> Case:
    case: Case = {"op": op, "shape": [4, 8, 128, size_k], "dtype": dtype, "target": target, **more}
    if op == "forward":
        case.setdefault("mask", [4, 1, 128, size_k])
    return case


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for op in ("forward", "backward"):
        for causal in (False, True):
            for dtype in DTYPES:
                # causal and plain in turn, the other way round in 32 bits; 16 and 32 bits on the other targets, and
                # these themselves where a row is short or does not fit on chip
                for at, size_k in enumerate(WIDTHS):
                    between = size_k in BETWEEN
                    if (at % 2 == 0) != (causal == (dtype == "bfloat16")):
                        continue
                    if between and dtype == "float32":  # the setting of 16 bits
                        continue
                    # registers and memory grow with the width: they are those of a corner, or fewer
                    case = _case(op, size_k, dtype, "sm_90", causal=causal, long=between)
                    if op == "forward" and causal and between and dtype == "bfloat16":
                        case["mask"] = None
                    cases[f"{op}-{size_k}-{dtype}-{causal}-sm_90"] = case
                for at, size_k in enumerate(CORNERS):
                    first = at + (op == "backward")
                    for target in OTHERS if size_k in (16384, 32768) else (OTHERS[first % 3],):
                        if (at % 2 == 0) == causal and dtype == DTYPES[(at + OTHERS.index(target)) % 2]:
                            case = _case(op, size_k, dtype, target, causal=causal)
                            cases[f"{op}-{size_k}-{dtype}-{causal}-{target}"] = case
        cases[f"{op}-1024-float16-sm_90"] = _case(op, 1024, "float16", "sm_90")
    cases["forward-1024-no-mask"] = _case("forward", 1024, "bfloat16", "sm_90", mask=None)
    cases["forward-65536-no-mask"] = _case("forward", 65536, "bfloat16", "sm_90", mask=None, causal=True)
    for size_k in (65528, 65536):  # rows on chip as pairs
        case = _case("forward", size_k, "bfloat16", "sm_90", mask=None, long=size_k == 65536)
        cases[f"forward-{size_k}-pairs-bfloat16-sm_90"] = case
    for dtype, target in (("bfloat16", "sm_80"), ("float16", "sm_100"), ("bfloat16", "gfx942")):
        cases[f"backward-32768-pairs-{dtype}-{target}"] = _case("backward", 32768, dtype, target)
    cases["forward-65536-pairs-bfloat16-gfx942"] = _case("forward", 65536, "bfloat16", "gfx942", mask=None)
    cases["backward-24576-pairs-bfloat16-sm_90"] = _case("backward", 24576, "bfloat16", "sm_90")
    cases["forward-1024-padding-mask"] = _case("forward", 1024, "bfloat16", "sm_90", mask=[4, 1, 1, 1024])
    return cases


CASES = _cases()

#: Cases that the checks above would fail on, and why: they show that the checks see something.
ODD = {
    "row length 1001": _case("forward", 1001, "bfloat16", "sm_90"),
    "misaligned pointers": _case("backward", 1024, "bfloat16", "sm_90", aligned=False),
    "more than 2**31 rows": {"op": "backward", "shape": [1 << 31, 2, 8], "dtype": "bfloat16", "target": "sm_90"},
    "one column": {"op": "forward", "shape": [5, 7, 1], "mask": [1], "dtype": "float32", "target": "sm_90"},
    "forward, 2 bytes, twice the limit": _case("forward", 65536, "bfloat16", "sm_90", on_chip=65536),
    "backward, 2 bytes, twice the limit": _case("backward", 32768, "bfloat16", "sm_90", on_chip=32768, causal=True),
    "backward, 4 bytes, twice the limit": _case("backward", 32768, "float32", "sm_90", on_chip=32768),
}


BIAS_OPS = ("gelu", "gelu_backward", "dropout", "dropout_add", "dropout_backward")


def _bias_case(op: str, size: int, dtype: str, target: str, **more: Any) -> Case:
    return {"op": op, "shape": [8192, size], "dtype": dtype, "target": target, **more}


def _bias_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for op in BIAS_OPS:
        # 1000 * 2 bytes is a multiple of 16, though 1000 is not one of 16
        for size in (64, 1000, 4096, 16384, 32768) if op != "dropout_add" else (1000, 4096, 32768):
            long = size in (64, 16384)  # a tile is the same for every width
            cases[f"{op}-{size}-bfloat16-sm_90"] = _bias_case(op, size, "bfloat16", "sm_90", long=long)
        for size in (1000, 4096):
            cases[f"{op}-{size}-float32-sm_90"] = _bias_case(op, size, "float32", "sm_90", long=size == 1000)
        first = BIAS_OPS.index(op)
        for at, target in enumerate(OTHERS, first):  # 16 and 32 bits in turn; the flat loop on one of them
            if not op.endswith("backward") and target != OTHERS[first % 3]:
                continue
            dtype, size = (("bfloat16", 1000), ("float32", 4096))[at % 2]
            cases[f"{op}-{size}-{dtype}-{target}"] = _bias_case(op, size, dtype, target)
    for op in BIAS_OPS[:2]:
        cases[f"{op}-erf-4096-bfloat16-sm_90"] = _bias_case(op, 4096, "bfloat16", "sm_90", approximate="none")
        cases[f"{op}-full-4096-float16-sm_90"] = _bias_case(op, 4096, "float16", "sm_90", bias=[8192, 4096])
    return cases


BIAS_CASES = _bias_cases()
BIAS_ODD = {
    "gelu, row length 1001": _bias_case("gelu", 1001, "bfloat16", "sm_90"),
    "gelu_backward, row length 1001": _bias_case("gelu_backward", 1001, "bfloat16", "sm_90"),
    "dropout, misaligned pointers": _bias_case("dropout", 4096, "bfloat16", "sm_90", aligned=False),
    "gelu_backward, one column": _bias_case("gelu_backward", 1, "float32", "sm_90"),
    "gelu_backward, more than 2**40 elements": {
        "op": "gelu_backward", "shape": [1 << 30, 4096], "dtype": "bfloat16", "target": "sm_90",
    },
    **{f"{op}, no bias": _bias_case(op, 4096, "bfloat16", "sm_90", bias=None) for op in BIAS_OPS},
    **{f"sums of {parts} parts": {"op": "sums", "shape": [parts, 4096], "dtype": "float32", "target": "sm_90"}
       for parts in (32, 1024)},
}  # fmt: skip

NORMS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
NORM_OPS = (*NORMS, *(f"{norm} backward" for norm in NORMS))


def _norm_case(op: str, size: int, dtype: str, target: str, **more: Any) -> Case:
    return {"op": op, "shape": [8192, size], "dtype": dtype, "target": target, **more}


def _norm_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for op in NORM_OPS:
        limits = (8192, 8192) if op.endswith("backward") else (32768, 16384)
        alone = not op.startswith("add_")  # it holds fewer values than with a residual, which has the same limits
        for dtype, limit in zip(DTYPES, limits):
            long = alone and dtype == "float32"
            cases[f"{op}-{limit}-{dtype}-sm_90"] = _norm_case(op, limit, dtype, "sm_90", long=long)
        if op.endswith("backward"):
            for size in (4096, 16384):
                cases[f"{op}-{size}-bfloat16-sm_90"] = _norm_case(op, size, "bfloat16", "sm_90", long=alone)
        # 1000 * 2 bytes is a multiple of 16, though 1000 is not one of 16; the ends of two norms alone
        for size in (128, 1000, 65536) if op.split()[0] in ("add_rms_norm", "layer_norm") else (1000,):
            cases[f"{op}-{size}-bfloat16-sm_90"] = _norm_case(op, size, "bfloat16", "sm_90")
        if "layer_norm" in op:
            cases[f"{op}-4096-float32-weight-sm_90"] = _norm_case(op, 4096, "bfloat16", "sm_90", weight="float32")
        # the targets in turn, and 16 and 32 bits: each target has either direction
        at = NORM_OPS.index(op)
        target, dtype, limit = OTHERS[(at - 1) % 3], DTYPES[(at + 1) % 2], limits[(at + 1) % 2]
        cases[f"{op}-{limit}-{dtype}-{target}"] = _norm_case(op, limit, dtype, target)
    for norm in NORMS[::3]:
        cases[f"{norm} sums-65536-sm_90"] = _norm_case(f"{norm} backward", 65536, "bfloat16", "sm_90", launch=1)
        cases[f"{norm} rows-8192-sm_90"] = _norm_case(f"{norm} backward", 8192, "bfloat16", "sm_90", sums=False)
    return cases


NORM_CASES = _norm_cases()
NORM_ODD = {
    "rms_norm, row length 1001": _norm_case("rms_norm", 1001, "bfloat16", "sm_90"),
    "rms_norm, more than 2**40 elements": {
        "op": "rms_norm", "shape": [1 << 30, 4096], "dtype": "bfloat16", "target": "sm_90",
    },
    # whole tiles of this width fit
    "add_rms_norm, float32, twice the limit": _norm_case("add_rms_norm", 32760, "float32", "sm_90", on_chip=32768),
    "layer_norm, one column": _norm_case("layer_norm backward", 1, "float32", "sm_90"),
    "add_layer_norm, row length 9001": _norm_case("add_layer_norm backward", 9001, "bfloat16", "sm_90"),
    "add_layer_norm, row length 12288": _norm_case("add_layer_norm backward", 12288, "bfloat16", "sm_90"),
    **{
        f"{op}, {dtype}, twice the limit": _norm_case(op, size, dtype, "sm_90", on_chip=size)
        for op, dtype, size in (
            *((f"{norm} backward", "bfloat16", 32768) for norm in NORMS),
            ("add_layer_norm backward", "float32", 16384),
        )
    },
}  # fmt: skip
ALL = CASES | BIAS_CASES | NORM_CASES | ODD | BIAS_ODD | NORM_ODD


@pytest.fixture(scope="module")
def compiled(compilations: ForkServer, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """The facts of the cases, by name. Those with on_chip are last: it stays set in the process that compiles."""
    names = sorted(wanted(ALL, request), key=lambda name: "on_chip" in ALL[name])
    return dict(zip(names, compiled_facts([ALL[name] for name in names], compilations), strict=True))


@pytest.mark.parametrize("name", each(CASES))
def test_compiles_well(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    case, facts = CASES[name], compiled[name]
    assert facts["spilled"] <= SPILL_NOISE
    assert not facts["float64"]
    assert not facts["overflows"]
    assert facts["address_64"]
    assert facts["registers"] <= 255
    if "pairs" in name:
        assert facts["kernel"] == f"{case['op']}_packed"
        assert facts["loads"].get("16", 0) >= 3
        assert set(facts["stores"]) <= {"16", "8"}  # the rows with infinities take narrower ones
        return
    if not 8192 < case["shape"][-1] < 65536:  # in between it depends on the dtype and the direction
        assert facts["kernel"].lstrip("_") == f"{case['op']}_{'long' if case['shape'][-1] == 65536 else 'on_chip'}"
    # scores, gradients and results go 16 bytes at a time; mask bytes as many at a time as scores do; the blocks of rows
    # with infinities are smaller
    assert "16" in facts["loads"]
    assert "16" in facts["stores"]
    if facts["kernel"] == "_forward_on_chip":
        assert set(facts["stores"]) <= {"16", "8", "4", "2"}
    else:
        assert set(facts["stores"]) == {"16"}
        assert set(facts["loads"]) <= ({"16", "8", "4", "2"} if case.get("mask") else {"16"})


@pytest.mark.parametrize("name", [name for name in ODD if "twice" in name])
def test_past_its_limit_a_row_spills(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["kernel"].endswith("on_chip")
    assert compiled[name]["spilled"] > SPILL_NOISE


def test_without_alignment_there_are_no_wide_accesses(compiled: dict[str, dict[str, Any]]) -> None:
    assert "16" not in compiled["misaligned pointers"]["loads"]
    assert "16" not in compiled["row length 1001"]["stores"]


def test_extreme_shapes_compile(compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled["more than 2**31 rows"]["address_64"]
    assert compiled["one column"]["kernel"] == "_forward_on_chip"


@pytest.mark.parametrize("name", each(BIAS_CASES))
def test_with_a_bias_compiles_well(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    case, facts = BIAS_CASES[name], compiled[name]
    assert facts["spilled"] <= SPILL_NOISE
    assert not facts["float64"]
    assert not facts["overflows"]
    assert facts["address_64"]
    assert facts["registers"] <= 128  # at 128 threads: four programs on a multiprocessor, or more
    if case["op"].endswith("backward") and "bias" not in case:
        assert facts["kernel"] == "_backward_columns"
        # besides: the bias, the seed and the sums, once a program
        assert facts["loads"]["16"] >= 1
        assert facts["stores"]["16"] >= 1
        assert set(facts["loads"]) | set(facts["stores"]) <= {"16", "8", "4", "2"}
        return
    assert set(facts["stores"]) == {"16"}
    assert set(facts["loads"]) <= {"16", "8"}
    assert facts["loads"].get("8", 0) == (case["op"].startswith("dropout") and case["target"] != "gfx942")  # the seed
    assert facts["shared"] == 0  # no layout is changed on the way from random words to elements


def test_flat_tiles_are_wide_for_any_row_length(compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled["gelu, row length 1001"]["stores"] == {"16": 2}
    assert "2" in compiled["gelu, row length 1001"]["loads"]  # the bias
    assert "16" not in compiled["gelu_backward, row length 1001"]["stores"]  # it goes by columns
    assert "16" not in compiled["dropout, misaligned pointers"]["stores"]


@pytest.mark.parametrize("name", each(NORM_CASES))
def test_a_norm_compiles_well(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    case, facts = NORM_CASES[name], compiled[name]
    assert facts["spilled"] <= SPILL_NOISE
    assert not facts["float64"]
    assert not facts["overflows"]
    assert facts["address_64"]
    assert facts["registers"] * facts["warps"] * (64 if case["target"] == "gfx942" else 32) <= 128 * 1024
    direction = "backward" if case["op"].endswith("backward") else "forward"
    kind = "sums" if case.get("launch") else "long" if case["shape"][-1] == 65536 else "on_chip"
    assert facts["kernel"] == f"_norm_{direction}_{kind}"
    # besides, once a row: its mean and rstd; once a program: the sums
    assert "16" in facts["loads"]
    assert set(facts["loads"]) <= {"16", "8", "4"}
    assert kind == "sums" or "16" in facts["stores"]
    assert set(facts["stores"]) <= {"16", "8", "4"}


@pytest.mark.parametrize("name", [name for name in NORM_ODD if "twice" in name])
def test_past_its_limit_a_row_of_a_norm_spills(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["kernel"].endswith("on_chip")
    if not triton.__version__.startswith("3.6"):  # which spills nothing of add_rms_norm in float32
        assert compiled[name]["spilled"] > SPILL_NOISE


def test_odd_shapes_of_norms_do_not_spill(compiled: dict[str, dict[str, Any]]) -> None:
    odd = {name: compiled[name] for name in NORM_ODD if "twice" not in name}
    assert all(facts["address_64"] for facts in odd.values())
    if triton.__version__.startswith("3.6"):  # which spills 32 bytes of it
        del odd["add_layer_norm, row length 12288"]
    assert max(facts["spilled"] for facts in odd.values()) <= SPILL_NOISE
    assert "16" not in odd["rms_norm, row length 1001"]["stores"]


@pytest.mark.parametrize("name", BIAS_ODD)
def test_odd_shapes_with_a_bias_do_not_spill(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[name]["spilled"] <= SPILL_NOISE


def test_table(compiled: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the facts (pytest -rP shows them); fails if a case is missing."""
    assert {name for name, case in ALL.items() if not case.get("long")} <= {*compiled}
    print(f"{'case':44} {'kernel':18} {'warps':>5} {'regs':>5} {'spill':>5} {'loads':26} stores")
    for name, facts in compiled.items():
        print(
            f"{name:44} {facts['kernel']:18} {facts['warps']:5} {facts['registers']:5} {facts['spilled']:5} "
            f"{_brief(facts['loads']):26} {_brief(facts['stores'])}"
        )


def _brief(widths: dict[str, int]) -> str:
    return " ".join(f"{count}x{width}B" for width, count in sorted(widths.items(), key=lambda item: -int(item[0])))

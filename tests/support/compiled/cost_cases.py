"""The calls whose kernels ``test_triton_costs.py`` compiles for sm_90: cases of ``triton_aot.py`` with more keys.

``bytes``: the fewest that must move, for each element of the shape. ``most``: the issue in percent that leaves the
memory as the limit, by LIMITS and EXCEPTIONS. Tensors of rows have 2**25 elements or more: smaller ones stay in the L2
cache.
"""

from __future__ import annotations

from typing import Any

from product_cases import PRODUCT_CASES

Case = dict[str, Any]
SIZES = {"bfloat16": 2, "float32": 4}
ELEMENTS = 2**25
WIDEST = 16384  # columns of the backward of norms: _norm_settings.NORM_WIDEST
ROTARY = {"op": "rotary_embedding", "q": [4, 32, 2048, 128], "k": [4, 8, 2048, 128], "cos": [2048, 64]}

#: The most issue of a kind of kernel in bfloat16, in percent: above about 45, a kernel falls below 95 % of the speed of
#: a copy; above 80, below 70 %. In float32, whose elements have twice the time, 45 for each.
LIMITS = {
    "softmax plain": 45, "softmax masked": 60, "softmax causal": 70, "softmax backward plain": 45,
    "softmax backward causal": 70, "gelu tanh": 55, "gelu erf": 80, "gelu backward": 55, "dropout": 60, "norm": 50,
    "swiglu": 50, "rotary": 50,
}  # fmt: skip

#: Rows of fewer than 512 columns, of which a program has several.
SHORT_LIMITS = {"softmax plain": 60, "softmax masked": 75, "softmax causal": 70}
FLOAT32_LIMIT = 45

#: Limits of ops for which there is no aim: what they take now. The polynomial of the exact GELU and its slope, both of
#: which geglu's backward computes, have twice the instructions of a logistic function; cross entropy reads two bytes
#: for an exponential, and writes none, as the log probabilities do. A norm beside a gate has the instructions of a
#: norm and of a logistic function. LayerNorm's and GELU's backward read a tile ahead: they have more instructions
#: than with one tile at a time, and an H200 takes 15 to 25 % less time for them. Parts of attention are rows of 128
#: columns, each with weights of its own. A weight of 4 to 8 bits is few bytes for the instructions that unpack and
#: multiply it.
EXCEPTIONS = {
    "geglu": 60, "geglu backward": 72, "cross entropy": 55, "cross entropy backward": 50, "layer norm backward": 55,
    "gelu erf backward": 57, "gated norm": 56, "gated norm backward": 63, "log probs": 56, "merge": 58,
    "packed Q8_0": 140, "packed Q4_0": 215,
}  # fmt: skip


def _limit(kind: str, dtype: str, columns: int = 512) -> int:
    if dtype == "float32":
        return 50 if kind == "merge" else FLOAT32_LIMIT
    limits = SHORT_LIMITS if columns < 512 and kind in SHORT_LIMITS else LIMITS
    return limits[kind] if kind in limits else EXCEPTIONS[kind]


def _softmax(dtype: str, size_k: int, kind: str = "plain", backward: bool = False) -> Case:
    size_q, e = (size_k if kind == "causal" else 1024), SIZES[dtype]
    limit = _limit(f"softmax backward {kind}" if backward else f"softmax {kind}", dtype, size_k)
    case: Case = {"op": "backward" if backward else "forward", "shape": [4, 16, size_q, size_k], "dtype": dtype}
    if kind == "causal":  # half of each input, and the whole result
        return {**case, "causal": True, "bytes": (2 if backward else 1.5) * e, "most": limit}
    if kind == "masked":  # sixteen heads share a mask
        return {**case, "mask": [4, 1, size_q, size_k], "bytes": 2 * e + 1 / 16, "most": limit}
    return {**case, "bytes": (3 if backward else 2) * e, "most": limit}


def _of_softmax() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    widths = (128, 256, 512, 1024, 2048, 4096, 8192)
    # masked and causal rows in turn: they have the settings of plain ones
    for kind, sizes, of_32_bits in (
        ("plain", widths, (128, 4096)), ("masked", widths[::2], (4096,)), ("causal", widths[1::2], (128,))
    ):  # fmt: skip
        for size_k in sizes:
            cases[f"softmax {kind} {size_k} bfloat16"] = _softmax("bfloat16", size_k, kind)
        for size_k in of_32_bits:
            cases[f"softmax {kind} {size_k} float32"] = _softmax("float32", size_k, kind)
    for size_k in (16384, 32768, 65536):
        cases[f"softmax plain {size_k} bfloat16"] = _softmax("bfloat16", size_k)
    for size_k in (16384, 32768):
        cases[f"softmax backward plain {size_k} bfloat16"] = _softmax("bfloat16", size_k, backward=True)
    cases["softmax plain 1000 bfloat16"] = _softmax("bfloat16", 1000)
    for kind in ("plain", "causal"):
        for size_k in (128, 1024, 8192):
            cases[f"softmax backward {kind} {size_k} bfloat16"] = _softmax("bfloat16", size_k, kind, backward=True)
        cases[f"softmax backward {kind} 512 float32"] = _softmax("float32", 512, kind, backward=True)
    return cases


def _of_flat_ops() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for op, form, accesses, kind in (
        ("gelu", "tanh", 2, "gelu tanh"),
        ("gelu", "none", 2, "gelu erf"),
        ("gelu_backward", "tanh", 3, "gelu backward"),
        ("gelu_backward", "none", 3, "gelu erf backward"),
        ("dropout", "", 2, "dropout"),
        ("dropout_add", "", 3, "dropout"),
        ("dropout_backward", "", 2, "dropout"),
    ):
        for columns, bias, which in ((4096, True, ""), (5120, True, "5120"), (4096, False, "no bias")):
            for dtype, size in SIZES.items():
                # the width is in a loop over columns, that of backward; of the exact GELU the polynomial alone differs
                columns_matter = which != "5120" or op.endswith("backward")
                if which and (dtype == "float32" or form == "none" or not columns_matter):
                    continue
                case: Case = {"op": op, "shape": [ELEMENTS // 4096, columns], "dtype": dtype, "approximate": form}
                case |= {"bytes": accesses * size, "most": _limit(kind, dtype), **({} if bias else {"bias": None})}
                cases[" ".join(part for part in (op, form, which, dtype) if part)] = case
    return cases


def _of_norms() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for op, forward, backward in (("rms_norm", 2, 3), ("add_rms_norm", 4, 5), ("layer_norm", 2, 3),
                                  ("add_layer_norm", 4, 5)):  # fmt: skip
        # in turn: up to 2048 columns the settings depend on the columns, and forward on the residual, alone
        between = (512, 2048) if op in ("rms_norm", "add_layer_norm") else (1024,)
        ends = (128, 4096, 16384) if op.startswith("add") else (4096, 8192, 16384)
        of_32_bits = 4096 if "layer" in op else 8192
        for dtype, widths in (("bfloat16", sorted((*ends, *between))), ("float32", (of_32_bits,))):
            for size in widths:
                case: Case = {"shape": [ELEMENTS // size, size], "dtype": dtype, "most": _limit("norm", dtype)}
                cases[f"{op} {size} {dtype}"] = {"op": op, "bytes": SIZES[dtype] * forward, **case}
                case |= {"op": f"{op} backward", "bytes": SIZES[dtype] * backward}
                if size == WIDEST:
                    case |= {"spilled": 16}
                if op == "layer_norm":
                    case |= {"most": _limit("layer norm backward", dtype)}
                if op == "add_layer_norm" and (size, dtype) == (4096, "float32"):
                    case |= {"spilled": 40}  # an H200 takes 328 us for 271 without the limit of registers
                cases[f"{op} backward {size} {dtype}"] = case
    return cases


def _of_gated_norms() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name, form in (
        ("", {}),
        (" gate first", {"gate_first": True}),
        (" 8 groups", {"gate_first": True, "groups": 8}),
    ):
        for dtype, widths in (("bfloat16", (128, 4096)), ("float32", (4096,))):
            if name == " gate first" and dtype == "float32":
                continue
            for size in widths if not name else (4096,):
                case: Case = {"shape": [ELEMENTS // size, size], "dtype": dtype, **form}
                most = _limit("gated norm", dtype)
                cases[f"gated_rms_norm{name} {size} {dtype}"] = {
                    "op": "gated_rms_norm", "bytes": 3 * SIZES[dtype], "most": most, **case,
                }  # fmt: skip
                most = _limit("gated norm backward", dtype)
                cases[f"gated_rms_norm backward{name} {size} {dtype}"] = {
                    "op": "gated_rms_norm backward", "bytes": 5 * SIZES[dtype], "most": most, **case,
                }  # fmt: skip
    return cases


def _of_merges_and_routing() -> dict[str, Case]:
    """Return rows of 128 columns: heads of two parts of the keys, and the logits of experts, of which 8 are chosen."""
    cases: dict[str, Case] = {}
    chosen = 8 * (8 + 4) / 128  # bytes of indices and weights for each logit
    for op, nbytes, most in (("top_k_routing", 2, 270), ("top_k_routing backward", 4, 215)):
        case: Case = {"op": op, "shape": [2**18, 128], "k": 8, "dtype": "bfloat16", "bytes": nbytes + chosen}
        cases[f"{op} bfloat16"] = {**case, "most": most}
    for dtype, size in SIZES.items():
        for op, accesses in (("merge_attention", 3), ("merge_attention backward", 5)):
            most = _limit("merge", dtype)
            case = {"op": op, "shape": [4, 32, 8192, 128], "dtype": dtype, "bytes": accesses * size}
            cases[f"{op} {dtype}"] = {**case, "most": most}
    return cases


def _of_other_ops() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for op in ("swiglu", "geglu"):
        for form, which in (("", ""), ("_halves", " packed"), ("_pairs", " interleaved")):
            case: Case = {"shape": [8192, 11008], "dtype": "bfloat16"}
            most = _limit(op, "bfloat16")
            cases[f"{op}{which} bfloat16"] = {"op": op + form, "bytes": 6, "most": most, **case}
            most = _limit("swiglu" if op == "swiglu" else "geglu backward", "bfloat16")
            cases[f"{op}{which} backward bfloat16"] = {"op": f"{op}{form}_backward", "bytes": 10, "most": most, **case}
    clamped: Case = {"shape": [8192, 11008], "dtype": "bfloat16", "limit": 7.0, "most": _limit("swiglu", "bfloat16")}
    cases["swiglu clamped bfloat16"] = {"op": "swiglu", "bytes": 6, **clamped}
    cases["swiglu clamped backward bfloat16"] = {"op": "swiglu_backward", "bytes": 10, **clamped}
    cases["swiglu packed float32"] = {
        "op": "swiglu_halves", "shape": [8192, 11008], "dtype": "float32", "bytes": 12,
        "most": _limit("swiglu", "float32"),
    }  # fmt: skip
    for dtype, size in SIZES.items():
        rotary: Case = {**ROTARY, "dtype": dtype, "angles": "float32", "shape": [4, 40, 2048, 128], "bytes": 2 * size}
        rotary["most"] = _limit("rotary", dtype)
        cases[f"rotary_embedding {dtype}"] = rotary
        cases[f"rotary_embedding backward {dtype}"] = {**rotary, "op": "rotary_embedding backward"}
        cases[f"rotary_embedding interleaved {dtype}"] = {**rotary, "interleaved": True}
        loss: Case = {"shape": [8192, 128256], "dtype": dtype}
        most = _limit("cross entropy", dtype)
        cases[f"cross_entropy {dtype}"] = {"op": "cross_entropy", "bytes": size, "most": most, **loss}
        odd: Case = {**loss, "shape": [8192, 50257]}  # rows that begin anywhere
        cases[f"cross_entropy odd {dtype}"] = {"op": "cross_entropy", "bytes": size, "most": most, **odd}
        if dtype == "bfloat16":
            small: Case = {"shape": [8192, 32000], "dtype": dtype}
            cases["cross_entropy 32000 bfloat16"] = {"op": "cross_entropy", "bytes": 2, "most": 60, **small}
            most = _limit("cross entropy backward", dtype)
            cases["cross_entropy backward 32000 bfloat16"] = {
                "op": "cross_entropy backward", "bytes": 4, "most": most, **small
            }  # fmt: skip
        most = _limit("cross entropy backward", dtype)
        cases[f"cross_entropy backward {dtype}"] = {
            "op": "cross_entropy backward", "bytes": 2 * size, "most": most, **loss
        }  # fmt: skip
        chunk: Case = {"op": "classes", "shape": [1024, 128256], "dtype": dtype, "options": False}
        cases[f"linear_cross_entropy {dtype}"] = {**chunk, "bytes": 3 * size, "most": FLOAT32_LIMIT}
        most = _limit("cross entropy", dtype)
        cases[f"linear_cross_entropy without gradient {dtype}"] = {
            **chunk, "gradient": False, "bytes": size, "most": most
        }  # fmt: skip
        of_rows: Case = {"shape": [1024, 128256], "dtype": dtype, "options": False}
        most = _limit("log probs", dtype)
        cases[f"linear_log_probs {dtype}"] = {"op": "linear_log_probs", "bytes": size, "most": most, **of_rows}
        cases[f"linear_log_probs backward {dtype}"] = {
            "op": "linear_log_probs backward", "bytes": 2 * size, "most": most, **of_rows
        }  # fmt: skip
    for name, nbytes in (("Q8_0", 34 / 32), ("Q4_0", 18 / 32)):
        row: Case = {"op": "quantized_linear", "shape": [1, 8192, 8192], "dtype": "bfloat16", "format": name}
        cases[f"quantized_linear {name} bfloat16"] = {
            **row,
            "bytes": nbytes,
            "most": _limit(f"packed {name}", "bfloat16"),
        }
    return cases


def _of_b200() -> dict[str, Case]:
    """Return the rows that one program holds, compiled for sm_100 with the settings of a B200."""
    cases: dict[str, Case] = {}
    for size in (4096, 8192, 16384):
        each = {
            "softmax": _softmax("bfloat16", size), "softmax backward": _softmax("bfloat16", size, backward=True),
        }  # fmt: skip
        for op, accesses in (("rms_norm", 2), ("layer_norm", 2), ("rms_norm backward", 3), ("layer_norm backward", 3)):
            case: Case = {"op": op, "shape": [ELEMENTS // size, size], "dtype": "bfloat16", "bytes": 2 * accesses}
            each[op] = {**case, "most": 100, "spilled": 16}
        for name, case in each.items():
            cases[f"B200: {name} {size} bfloat16"] = {**case, "target": "sm_100"}
    return cases


#: The least estimated speed, in percent of a copy's: above what the kernels had before they were made for it.
LEAST = {
    ("cross_entropy 32000 bfloat16", "H200"): 92, ("cross_entropy bfloat16", "H200"): 92,
    ("rms_norm backward 4096 bfloat16", "H200"): 92, ("layer_norm backward 4096 bfloat16", "H200"): 90,
    ("rms_norm backward 8192 bfloat16", "H200"): 86, ("layer_norm backward 8192 bfloat16", "H200"): 80,
    **{(f"B200: {name} {size} bfloat16", "B200"): 80
       for name in ("softmax", "softmax backward", "rms_norm", "layer_norm") for size in (4096, 8192, 16384)},
    **{(f"B200: {name} backward 4096 bfloat16", "B200"): 80 for name in ("rms_norm", "layer_norm")},
    ("B200: rms_norm backward 8192 bfloat16", "B200"): 80,
}  # fmt: skip


CASES = (
    _of_softmax() | _of_flat_ops() | _of_norms() | _of_gated_norms() | _of_merges_and_routing() | _of_other_ops()
    | PRODUCT_CASES | _of_b200()
)  # fmt: skip

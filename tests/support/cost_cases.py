"""The calls whose kernels ``test_triton_costs.py`` compiles for sm_90: cases of ``triton_aot.py`` with more keys.

``bytes``: the fewest that must move, for each element of the shape. ``most``: of the issue, in percent. ``threads``: at
least so many percent are resident; 50 where it is left out. Above the aims of 60 and 55 %: dropout without a residual
(70) and the backward of the exact GELU (56), where Philox and the normal distribution take the instructions; and cross
entropy, which has no aim.
"""

from __future__ import annotations

from typing import Any

Case = dict[str, Any]
SIZES = {"bfloat16": 2, "float32": 4}
ROTARY = {"op": "rotary_embedding", "q": [4, 32, 2048, 128], "k": [4, 8, 2048, 128], "cos": [2048, 64]}


def _softmax(dtype: str, size_k: int, limit: int, kind: str = "plain", backward: bool = False) -> Case:
    size_q, e = (size_k if kind == "causal" else 1024), SIZES[dtype]
    case: Case = {"op": "backward" if backward else "forward", "shape": [4, 16, size_q, size_k], "dtype": dtype}
    if kind == "causal":  # half of each input, and the whole result
        return {**case, "causal": True, "bytes": (2 if backward else 1.5) * e, "most": limit}
    if kind == "masked":  # sixteen heads share a mask
        return {**case, "mask": [4, 1, size_q, size_k], "bytes": 2 * e + 1 / 16, "most": limit}
    return {**case, "bytes": (3 if backward else 2) * e, "most": limit}


def _of_softmax() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for kind, short, longer in (("plain", 60, 45), ("masked", 75, 60), ("causal", 70, 70)):
        for size_k in (128, 256, 512, 1024, 4096, 8192):
            limit = short if size_k < 512 else longer
            cases[f"softmax {kind} {size_k} bfloat16"] = _softmax("bfloat16", size_k, limit, kind)
        cases[f"softmax {kind} 4096 float32"] = _softmax("float32", 4096, 45, kind)
    cases["softmax plain 1000 bfloat16"] = _softmax("bfloat16", 1000, 60)
    for kind, limit in (("plain", 45), ("causal", 70)):
        for size_k in (128, 1024, 8192):
            case = _softmax("bfloat16", size_k, limit, kind, backward=True)
            cases[f"softmax backward {kind} {size_k} bfloat16"] = case
    return cases


def _of_flat_ops() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for op, accesses, limits in (
        ("gelu", 2, {"tanh": 55, "none": 80}),
        ("gelu_backward", 3, {"tanh": 55, "none": 56}),
        ("dropout", 2, {"": 70}),
        ("dropout_add", 3, {"": 60}),
        ("dropout_backward", 2, {"": 70}),
    ):
        for form, limit in limits.items():
            for dtype, size in SIZES.items():
                case = {"op": op, "shape": [8192, 4096], "dtype": dtype, "bytes": accesses * size, "approximate": form}
                name = f"{op} {form}".strip()
                cases[f"{name} {dtype}"] = {**case, "most": limit if size == 2 else 45}
    return cases


def _of_other_ops() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for op, forward, backward in (("rms_norm", 2, 3), ("add_rms_norm", 4, 5), ("layer_norm", 2, 3)):
        for size in (1024, 4096, 8192):
            case: Case = {"shape": [8192, size], "dtype": "bfloat16", "most": 50}
            threads = 37 if op == "layer_norm" and size == 8192 else 50
            cases[f"{op} {size} bfloat16"] = {"op": op, "bytes": 2 * forward, "threads": threads, **case}
            # the sums of weight and bias stay in registers
            case |= {"op": f"{op} backward", "bytes": 2 * backward, "threads": 25}
            cases[f"{op} backward {size} bfloat16"] = case
    gated: Case = {"shape": [8192, 11008], "dtype": "bfloat16"}
    for op in ("swiglu", "geglu"):
        gated["most"] = 50 if op == "swiglu" else 62
        cases[f"{op} bfloat16"] = {"op": op, "bytes": 6, **gated}
        cases[f"{op} backward bfloat16"] = {"op": f"{op}_backward", "bytes": 10, **gated}
    rotary = {**ROTARY, "dtype": "bfloat16", "angles": "float32", "shape": [4, 40, 2048, 128], "bytes": 4, "most": 50}
    cases["rotary_embedding bfloat16"] = rotary
    loss = {"shape": [8192, 128256], "dtype": "bfloat16", "most": 85}
    cases["cross_entropy bfloat16"] = {"op": "cross_entropy", "bytes": 2, **loss}
    cases["cross_entropy backward bfloat16"] = {"op": "cross_entropy backward", "bytes": 4, **loss}
    return cases


CASES = _of_softmax() | _of_flat_ops() | _of_other_ops()

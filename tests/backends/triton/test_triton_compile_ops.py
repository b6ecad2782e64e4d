"""The compiled Triton kernels of the gated activations, the losses and rotary_embedding.

As ``test_triton_compile.py`` has them for the first ops.
"""

from __future__ import annotations

from typing import Any

import pytest
from compiled_facts import each

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="triton is not installed: nothing to compile with")

Case = dict[str, Any]
OTHERS = ("sm_80", "sm_100", "gfx942")  # than sm_90, which has every case


def _in_turn(op: str, shapes: dict[str, Case], others: int) -> dict[str, Case]:
    """Return both directions of each shape on sm_90, and of the first ``others`` in float32 on one more target."""
    return {
        f"{op}{side}, {name}, {dtype}, {target}": {"op": f"{op}{side}", "dtype": dtype, "target": target, **shape}
        for turn, (name, shape) in enumerate(shapes.items())
        for side in ("", " backward")
        for dtype, target in (("bfloat16", "sm_90"), ("float32", OTHERS[turn % 3]))[: 1 + (turn < others)]
    }


# ------------------------------------------------------------------------------------------------- linear_cross_entropy


def _of_classes() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for at, target in enumerate(("sm_80", "sm_90", "sm_100", "gfx942")):
        for turn, dtype in enumerate(("bfloat16", "float32"), at):
            plain = {"op": "classes", "shape": [512, 128256], "dtype": dtype, "target": target}
            # the other targets than sm_90 have the options, whose kernel has all that the plain one has
            if target == "sm_90":
                cases[f"plain-{dtype}-{target}"] = {**plain, "options": False}
            if target == "sm_90" or not turn % 2:
                cases[f"options-{dtype}-{target}"] = {**plain, "bias": True, "scale": True}
    sm_90 = {"op": "classes", "dtype": "bfloat16", "target": "sm_90"}
    cases["odd"] = {**sm_90, "shape": [512, 50257]}  # rows of logits are padded: 16-byte accesses all the same
    cases["few"] = {**sm_90, "shape": [512, 1000]}
    cases["loss alone"] = {**sm_90, "shape": [512, 32000], "gradient": False}
    cases["2**37 logits"] = {**sm_90, "shape": [1 << 20, 1 << 17]}
    return cases


def check_classes(case: Case, facts: dict[str, Any]) -> None:
    assert facts["registers"] * facts["warps"] * (64 if case["target"] == "gfx942" else 32) <= 2**16
    # the rows of logits by 16 bytes; beside them the target, its logit and the loss, of one element each
    wide, narrow = facts["loads"].pop("16"), facts["loads"]
    assert wide >= (1 if case.get("gradient") is False else 2)
    assert sum(narrow.values()) <= 6, facts
    if case.get("gradient", True):
        assert facts["stores"]["16"] >= 1
    # the loss, and the target's gradient, which is written over that of the other logits
    assert sum(count for width, count in facts["stores"].items() if width != "16") <= 2, facts


# ----------------------------------------------------------------------------------------------------- linear_log_probs


def _of_log_probs() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for at, target in enumerate(("sm_90", *OTHERS)):
        for side in ("", " backward"):
            case = {"op": f"linear_log_probs{side}", "shape": [512, 128256], "target": target}
            cases[f"every option{side}-{target}"] = {**case, "dtype": ("bfloat16", "float32")[at % 2]}
            if target == "sm_90":
                cases[f"plain{side}"] = {**case, "dtype": "float16", "options": False}
                cases[f"2**37 logits{side}"] = {**case, "shape": [1 << 20, 1 << 17], "dtype": "bfloat16"}
    return cases


def check_log_probs(case: Case, facts: dict[str, Any]) -> None:
    assert facts["registers"] * facts["warps"] * (64 if case["target"] == "gfx942" else 32) <= 2**16
    # the rows of logits by 16 bytes; beside them numbers of the row
    assert facts["loads"].pop("16") >= 1
    assert sum(facts["loads"].values()) <= 6, facts
    narrow = sum(count for width, count in facts["stores"].items() if width != "16")
    assert narrow <= (0 if "backward" in case["op"] else 3), facts


# ---------------------------------------------------------------------------------------------------------------- gated

FORMS = ("swiglu", "swiglu_halves", "swiglu_pairs", "geglu", "geglu_halves", "geglu_pairs")
GATED = tuple(f"{op}{side}" for op in FORMS for side in ("", "_backward"))


def _of_gated() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for at, op in enumerate(GATED):
        # 16 and 32 bits in turn, by op and direction
        others = [(("bfloat16", "float32")[(at + turn) % 2], 11008, target) for turn, target in enumerate(OTHERS)]
        if "geglu" in op:  # the same loads and stores as swiglu, around another function
            rows = [("bfloat16", 11008, "sm_90"), ("float32", 4096, "sm_90"), others[at % 3]]
            if "halves" in op:
                del rows[1]
        else:
            rows = [
                ("bfloat16", 14336, "sm_90"),
                ("bfloat16", 1000, "sm_90"),  # 1000 * 2 bytes is a multiple of 16, though 1000 is not one of 16
                ("float32", 4096, "sm_90"),
                ("bfloat16", 64, "sm_90"),
                ("float16", 2880, "sm_90"),
                others[at % 3],
            ]
            if "pairs" not in op:  # one kernel serves two tensors and the halves of one: the widths in turn
                del rows[slice(3, 5) if "halves" in op else slice(1, 3)]
            if "halves" in op:
                huge = {"op": op, "shape": [1 << 26, 4096], "dtype": "bfloat16", "target": "sm_90"}
                cases[f"{op}-2**38 elements"] = huge
            else:
                clamped = {"op": op, "shape": [8192, 2880], "dtype": "bfloat16", "target": "sm_90", "limit": 7.0}
                cases[f"{op}-clamped"] = clamped
        for dtype, width, target in rows:
            case = {"op": op, "shape": [8192, width], "dtype": dtype, "target": target}
            cases[f"{op}-{width}-{dtype}-{target}"] = case
    return cases


def check_gated(case: Case, facts: dict[str, Any]) -> None:
    assert facts["registers"] <= 128  # at 128 threads: four programs on a multiprocessor, or more
    assert facts["kernel"].startswith("_backward" if case["op"].endswith("backward") else "_forward")
    assert set(facts["loads"]) == set(facts["stores"]) == {"16"}, facts


# -------------------------------------------------------------------------------------------------------- cross_entropy


def _of_loss() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for op in ("cross_entropy", "cross_entropy backward"):
        for dtype, width, target in (
            ("bfloat16", 128256, "sm_90"),
            ("bfloat16", 256000, "sm_90"),
            ("bfloat16", 1000, "sm_90"),  # 1000 * 2 bytes is a multiple of 16, though 1000 is not one of 16
            ("bfloat16", 64, "sm_90"),
            ("float16", 32000, "sm_90"),
            ("float32", 128256, "sm_90"),
            *((("bfloat16", "float32")[at % 2], 128256, target) for at, target in enumerate(OTHERS, len(op) % 2)),
        ):
            # in turn on the other targets, with options and without, for 16 and 32 bits; and in turn for small widths
            turn: tuple[bool, ...] = (False, True)
            if target in OTHERS:
                turn = ((OTHERS.index(target) + (dtype == "float32")) % 2 == 1,)
            elif width != 128256:
                turn = (width != 1000,)
            for options in turn:
                case = {"op": op, "shape": [8192, width], "dtype": dtype, "target": target, "options": options}
                cases[f"{op}-{width}-{dtype}-{target}{'-options' * options}"] = case
        huge = {"op": op, "shape": [1 << 22, 128256], "dtype": "bfloat16", "target": "sm_90"}
        cases[f"{op}-2**39 elements"] = huge
        cut = {"op": op, "shape": [8192, 50257], "padded": 50304, "dtype": "bfloat16", "target": "sm_90"}
        cases[f"{op}-cut out of a padded vocabulary"] = cut
    return cases


def check_loss(case: Case, facts: dict[str, Any]) -> None:
    assert facts["kernel"] == ("_backward" if case["op"].endswith("backward") else "_forward")
    if not case["target"].startswith("gfx") and "padded" not in case:
        # target, lse and the like are scalars of 8 and 4 bytes
        assert "16" in facts["loads"], facts
        assert not {"2", "1"} & set(facts["loads"]) - _wanted_logit(case), facts
        if case["op"].endswith("backward"):
            assert set(facts["stores"]) == {"16"}, facts


def _wanted_logit(case: Case) -> set[str]:
    """Return the width of the one access of forward that reads the logit of the target."""
    return set() if case["op"].endswith("backward") else {"4" if case["dtype"] == "float32" else "2"}


# ----------------------------------------------------------------------------------------------------- rotary_embedding

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


def _of_rotary() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    # backward is the same kernel with another sign
    back = {name: shape for name, shape in SHAPES.items() if "interleaved" not in name}
    for op, shapes in (("rotary_embedding", {**SHAPES, **MORE}), ("rotary_embedding backward", back)):
        for name, shape in shapes.items():
            case = {"op": op, "dtype": "bfloat16", "angles": "float32", "target": "sm_90", **shape}
            cases[f"{op}, {name}"] = case
    for turn, (name, shape) in enumerate(SHAPES.items()):
        dtype = ("float32", "bfloat16")[turn % 2]
        if turn < 2:
            cases[f"{name}, {dtype}, sm_90"] = {"op": "rotary_embedding", "dtype": dtype, "target": "sm_90", **shape}
        # 16 and 32 bits in turn; the first shape on each target
        targets = enumerate(OTHERS) if not turn else [(turn // 2, OTHERS[turn % 3])]
        for at, target in targets:
            dtype = ("bfloat16", "float32")[at % 2]
            cases[f"{name}, {dtype}, {target}"] = {
                "op": "rotary_embedding", "dtype": dtype, "target": target, **shape
            }  # fmt: skip
    return cases


def check_rotary(case: Case, facts: dict[str, Any]) -> None:
    assert facts["kernel"] == "_rotate"
    # at 128 threads: 8 programs on a multiprocessor, or more; a lane of gfx942 has 128 registers with 4 waves
    assert facts["registers"] <= (128 if case["target"] == "gfx942" else 64), facts
    assert set(facts["loads"]) == set(facts["stores"]) == {"16"}, facts


# -------------------------------------------------------------------------------------------------------- top_k_routing

ROUTERS: dict[str, Case] = {
    "mixtral": {"shape": [8192, 8], "k": 2},
    "qwen3": {"shape": [8192, 128], "k": 8},
    "deepseek_v3": {
        "shape": [8192, 256], "k": 8, "score": "sigmoid", "bias": True, "groups": 8, "top_groups": 4
    },
    "deepseek_v2": {"shape": [8192, 160], "k": 6, "groups": 8, "top_groups": 3, "group_score": "max"},
    "gpt_oss": {"shape": [8192, 32], "k": 4, "score": "topk_softmax"},
    "given": {"shape": [8192, 256], "k": 6, "score": "sqrt_softplus", "given": True},
    "2**34 logits": {"shape": [1 << 26, 256], "k": 8},
}  # fmt: skip


def _of_routing() -> dict[str, Case]:
    return _in_turn("top_k_routing", ROUTERS, 4)


def check_routing(case: Case, facts: dict[str, Any]) -> None:
    assert facts["kernel"] == ("_backward" if case["op"].endswith("backward") else "_forward")
    assert facts["registers"] <= 128, facts  # four programs of 128 threads on a multiprocessor, or more


# --------------------------------------------------------------------------------------------------------------- sample


def _of_sample() -> dict[str, Case]:
    targets = ("sm_80", "sm_90", "sm_100", "gfx942")
    every = {"filters": True, "mask": True, "log_prob": "filtered", "float64": True}  # of the limit of top_p
    options = (every, {"log_prob": "unfiltered"}, {**every, "log_prob": "unfiltered"}, {**every, "mask": False})
    return {
        target: {"op": "sample", "shape": [64, 151936], "dtype": dtype, "target": target, **each}
        for target, dtype, each in zip(targets, ("bfloat16", "float32", "float16", "float32"), options)
    }


def check_sample(case: Case, facts: dict[str, Any]) -> None:
    assert facts["kernel"] == "_sample"
    assert facts["registers"] <= 128, facts  # a program of 512 threads has all of a multiprocessor


# ---------------------------------------------------------------------------------------- select_keys, sparse_attention

#: (B, Nq, Nk, Sq, Sk, D, Dv, K)
SPARSE: dict[str, Case] = {
    "expanded": {"shape": [1, 128, 128, 4096, 4096, 192, 128, 2048]},
    "latent": {"shape": [1, 128, 1, 4096, 32768, 576, 512, 2048]},
    "masked heads": {"shape": [1, 6, 2, 100, 300, 40, 24, 50], "mask": True},
}


def _of_sparse() -> dict[str, Case]:
    """Return each launch on sm_90 and, in float32, on one more target; select_keys: on two more."""
    cases: dict[str, Case] = {}
    for turn, (name, shape) in enumerate(SPARSE.items()):
        for launch, op in enumerate(("sparse_attention", "sparse_attention backward", "sparse_attention backward")):
            for dtype, target in (("bfloat16", "sm_90"), ("float32", OTHERS[(turn + launch) % 3])):
                # by ptxas's own choice, of fewer registers than there are
                case = {"op": op, "launch": max(launch - 1, 0), "dtype": dtype, "target": target, "spilled": 24}
                cases[f"{op} {launch}, {name}, {target}"] = {**case, **shape}
    for launch, dtype, target in (
        (0, "bfloat16", "sm_90"), (0, "bfloat16", "sm_100"), (0, "float32", "sm_80"), (0, "float32", "gfx942"),
        (1, "bfloat16", "sm_90"), (1, "float32", "gfx942"),
    ):  # fmt: skip
        case = {"op": "select_keys", "launch": launch, "dtype": dtype, "target": target, "mask": target == "sm_90"}
        cases[f"select_keys {launch}, {target}"] = {**case, "shape": [1, 4096, 32768, 64, 128, 2048]}
    return cases


def check_sparse(case: Case, facts: dict[str, Any]) -> None:
    kernels = ("_rank", "_select") if case["op"] == "select_keys" else ("_queries", "_keys")
    assert facts["kernel"] == ("_forward" if case["op"] == "sparse_attention" else kernels[case["launch"]])
    assert facts["shared"] <= 99 * 1024  # of a program on 8.6, 8.9 and 12.x
    assert facts["registers"] * facts["warps"] * (64 if case["target"] == "gfx942" else 32) <= 2**16


# ------------------------------------------------------------------------------------------------------- gated_rms_norm

GATED_NORMS: dict[str, Case] = {
    "heads": {"shape": [262144, 128]},
    "gate first": {"shape": [8192, 4096], "gate_first": True},
    "groups": {"shape": [4096, 8192], "groups": 8, "gate_first": True},
    "sigmoid": {"shape": [8192, 2560], "sigmoid": True},
}


def _of_gated_norm() -> dict[str, Case]:
    return _in_turn("gated_rms_norm", GATED_NORMS, 3)


def check_gated_norm(case: Case, facts: dict[str, Any]) -> None:
    side = "backward" if case["op"].endswith("backward") else "forward"
    assert facts["kernel"] == f"_gated_norm_{side}"
    # x, gate and grad by 8 bytes or more; beside them rstd, or nothing
    narrow = sum(count for width, count in facts["loads"].items() if width not in ("8", "16"))
    assert narrow <= (4 if side == "backward" else 0), facts
    assert facts["registers"] * facts["warps"] * (64 if case["target"] == "gfx942" else 32) <= 2**16


# ----------------------------------------------------------------------------------------------------- merge_attention

MERGES: dict[str, Case] = {  # (B, S, N, D) in memory
    "heads of 128": {"shape": [2, 4096, 32, 128]},
    "heads of 64": {"shape": [2, 4096, 16, 64]},
    "heads of 80": {"shape": [2, 1000, 16, 80]},
    "long rows": {"shape": [1, 512, 1, 4096]},
}


def _of_merge() -> dict[str, Case]:
    return _in_turn("merge_attention", MERGES, 3)


def check_merge(case: Case, facts: dict[str, Any]) -> None:
    side = "backward" if case["op"].endswith("backward") else "forward"
    assert facts["kernel"] == f"_merge_{side}"
    assert facts.get("reads_first", True)  # a compiler lifts no read over a store
    # rows by 16 bytes; beside them one lse of each row, and the gradient of one
    assert facts["loads"].get("16", 0) >= 2, facts
    assert facts["registers"] * facts["warps"] * (64 if case["target"] == "gfx942" else 32) <= 2**16


# -------------------------------------------------------------------------------------------------------- causal_conv1d

CONVOLUTIONS: dict[str, Case] = {
    "positions": {"shape": [2, 4096, 4096]},
    "channels": {"shape": [2, 4096, 4096], "by_channel": True},
    "packed with states": {"shape": [1, 8192, 16384], "by_channel": True, "packed": 33, "states": True},
    "states": {"shape": [64, 4096, 512], "states": True, "width": 3, "spilled": 8},
    "cut rows": {"shape": [1, 1024, 1040]},
}


def _of_convolution() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for turn, (name, shape) in enumerate(CONVOLUTIONS.items()):
        launches = [("causal_conv1d", 0), ("causal_conv1d backward", 0)]
        launches += [("causal_conv1d backward", 2)] if shape.get("states") else []
        for op, launch in launches:
            places = (("bfloat16", "sm_90"), ("float32", OTHERS[turn % 3]))[: 2 if turn < 3 else 1]
            for dtype, target in (*places, *(("bfloat16", other) for other in OTHERS if name == "cut rows")):
                case = {"op": op, "launch": launch, "dtype": dtype, "target": target, **shape}
                cases[f"{op}, launch {launch}, {name}, {dtype}, {target}"] = case
    return cases


def check_convolution(case: Case, facts: dict[str, Any]) -> None:
    walks, back = case.get("by_channel") and "packed" not in case, case["op"].endswith("backward")
    octets = case["dtype"] != "float32" and not (case.get("by_channel") or case.get("states"))
    first = f"{'octets' if octets else 'walk' if walks else '_conv'}_{'backward' if back else 'forward'}"
    assert facts["kernel"] == (first, "_add_sums", "_conv_before")[case["launch"]]
    if octets:  # by 16 bytes, but for the weights, the bias and the sums, and no number goes through shared memory
        assert facts["loads"].keys() <= {"16", "8" if case["target"] == "gfx942" else "16", "2"}
        assert facts["stores"].keys() == {"16", *(["4"] if back else [])}
        assert facts["shared"] == 0
    if walks:  # four channels at a time; the weights and the bias once
        narrow = sum(facts["loads"].get(width, 0) for width in ("2", "4"))
        assert set(facts["stores"]) <= {"16", "8", *(["4"] if back else [])}
        assert narrow <= 4 * (case.get("width", 4) + 1)
        assert facts["registers"] <= (168 if case["target"] in ("sm_100", "gfx942") else 128)
    assert facts["registers"] * facts["warps"] * (64 if case["target"] == "gfx942" else 32) <= 2**16


# ---------------------------------------------------------------------------------------------------- quantized_linear

#: By launch: a kernel's name, format, dtype, rows.
PRODUCTS = {
    "one row": ("_vector", "Q8_0", "bfloat16", 1),
    "a few rows": ("_vector", "Q5_1", "float32", 8),
    "tiles": ("_tiles", "Q8_0", "bfloat16", 512),
    "tiles of fifth bits": ("_tiles", "Q5_0", "float16", 512),
    "unpacked": ("_unpack", "Q5_1", "bfloat16", 512),
}
#: The same of formats with a tensor of scales: e8m0, e4m3, floats of blocks, with zeros, by a table.
SCALED = {
    "one row of MXFP4": ("_vector", "MXFP4", "bfloat16", 1),
    "a few rows of FP8_BLOCK": ("_vector", "FP8_BLOCK", "float16", 8),
    "a few rows of INT4_GROUP": ("_vector", "INT4_GROUP", "float32", 8),
    "tiles of NVFP4": ("_tiles", "NVFP4", "bfloat16", 512),
    "tiles of MXFP4": ("_tiles", "MXFP4", "float16", 512),
    "tiles of FP8_BLOCK": ("_tiles", "FP8_BLOCK", "bfloat16", 512),
    "tiles of INT4_GROUP": ("_tiles", "INT4_GROUP", "bfloat16", 512),
    "NF4, unpacked": ("_unpack", "NF4", "bfloat16", 512),
}


def _of_quantized() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for at, (name, (_, packed, dtype, rows)) in enumerate(PRODUCTS.items()):
        for target in ("sm_90", OTHERS[at % 3], *(OTHERS if name == "tiles" else ())):
            case = {"op": "quantized_linear", "shape": [rows, 4096, 4096], "dtype": dtype, "target": target}
            cases[f"{name}, {target}"] = {**case, "format": packed, "spilled": 8}
    cases["2**33 weights"] = {**cases["one row, sm_90"], "shape": [1, 2**16, 2**17]}
    return cases


def _of_scaled() -> dict[str, Case]:
    return {
        f"{name}, {target}": {
            "op": "quantized_linear",
            "shape": [rows, 4096, 4096],
            "dtype": dtype,
            "format": packed,
            "target": target,
            "spilled": 8,
        }
        for at, (name, (_, packed, dtype, rows)) in enumerate(SCALED.items())
        for target in ("sm_90", OTHERS[at % 3], *(OTHERS if name == "tiles of NVFP4" else ()))
    }


def _of_packed_experts() -> dict[str, Case]:
    """Return both products of gpt-oss's format on each target, and those of other formats on one."""
    targets = ("sm_90", *OTHERS)
    others = zip(("NVFP4", "FP8_BLOCK", "INT4_GROUP", "NF4"), ("float16", "float32", "bfloat16", "bfloat16"), targets)
    forms = [("MXFP4", "bfloat16", target) for target in targets] + list(others)
    return {
        f"packed_experts{side}, {packed}, {target}": {
            "op": f"packed_experts{side}",
            "shape": [4096, 32, 5760, 2880] if packed != "FP8_BLOCK" else [100, 8, 320, 192],
            "dtype": dtype,
            "format": packed,
            "target": target,
            "spilled": 8,
        }
        for packed, dtype, target in forms
        for side in ("", " gradient")
    }


def check_packed_experts(case: Case, facts: dict[str, Any]) -> None:
    assert facts["kernel"] == ("_gradient" if case["op"].endswith("gradient") else "_rows")
    # two programs on a processor, or more: it has 2^16 registers, and twice as many on gfx942, whose warps are of 64
    assert facts["registers"] * facts["warps"] * 32 <= 2**15, facts


def _of_int8() -> dict[str, Case]:
    case = {"op": "int8_linear", "dtype": "bfloat16", "spilled": 8}
    shapes = {"few": ([8, 4096, 4096], OTHERS[:1]), "tiles": ([512, 4096, 4096], ("sm_90", *OTHERS))}
    return {
        f"int8, {name}, {target}": {**case, "shape": shape, "target": target}
        for name, (shape, targets) in shapes.items()
        for target in targets
    }


def check_int8(case: Case, facts: dict[str, Any]) -> None:
    # several programs on a processor; the rows are read by 4 bytes or more, some of int8 lie at no multiple of 16
    assert facts["registers"] * facts["warps"] <= 2**10, facts
    assert facts["loads"].keys() <= {"2", "4", "8", "16"}, facts


# ---------------------------------------------------------------------------------------------------- keys in pages

TOKENS, PROMPTS = [8, 8, 512, 32, 8, 128], [4096, 4, 512, 32, 8, 128]
PAGED: dict[str, Case] = {
    "int8, sm_90": {"shape": TOKENS, "cache": "int8"},
    "int8, sm_80": {"shape": TOKENS, "cache": "int8"},
    "float8, sm_100": {"shape": PROMPTS, "cache": "float8_e4m3fn", "dtype": "float16", "spilled": 8},
    "float8, gfx942": {"shape": TOKENS, "cache": "float8_e4m3fn"},
    "prompts, sm_90": {"shape": PROMPTS},
    "float32, sm_90": {"shape": PROMPTS, "dtype": "float32"},
    "heads of 256, sm_90": {"shape": [*PROMPTS[:5], 256]},
    "join, sm_90": {"shape": TOKENS, "launch": 1},
}


def _of_paged() -> dict[str, Case]:
    of_both = {"dtype": "bfloat16"}
    stored = {"op": "store_kv", "shape": [4096, 2048, 8, 128], **of_both}
    return {
        **{
            name: {"op": "paged_attention", **of_both, **case, "target": name.rpartition(" ")[2]}
            for name, case in PAGED.items()
        },
        "stored int8": {**stored, "cache": "int8", "target": "sm_90"},
        "stored float8": {**stored, "cache": "float8_e4m3fn", "target": "sm_80"},
    }


def check_paged(case: Case, facts: dict[str, Any]) -> None:
    assert facts["registers"] * facts["warps"] <= 2**11, facts  # one program on a processor or more
    assert facts["loads"].keys() & {"8", "16"}, facts  # codes of 8 columns or more
    if case["target"] == "sm_100":
        assert facts["chained"] == 0


# ------------------------------------------------------------------------------------------ modulated norms, group_norm


def _of_modulated() -> dict[str, Case]:
    """Return each launch on sm_90 and, in the other form, on one more target."""
    launches = [("modulated", 0), ("modulated backward", 0), ("modulated backward", 1)]
    launches += [(f"group_norm{side}", launch) for side in ("", " backward") for launch in (0, 1)]
    cases: dict[str, Case] = {}
    for turn, (op, launch) in enumerate(launches):
        for other, (dtype, target) in enumerate((("bfloat16", "sm_90"), ("float32", OTHERS[turn % 3]))):
            rows = {"shape": [2, 4096, 3072], "kind": ("layer", "rms")[other]}
            # by ptxas's own choice, as in test_triton_compile.py: of 255 registers it takes 48 there
            spilled = 8 * (target == "sm_100")
            image = {"shape": [2, 320, 64, 64], "by_channel": other == 1, "spilled": spilled}
            form = rows if op.startswith("modulated") else image
            case = {**form, "op": op, "launch": launch, "dtype": dtype, "target": target}
            cases[f"{op} {launch}, {target}"] = case
    return cases


def check_modulated(case: Case, facts: dict[str, Any]) -> None:
    # a program with the most registers that these kernels have, of 128 threads, is one of three of a processor or more
    assert facts["registers"] * facts["warps"] * (64 if case["target"] == "gfx942" else 32) <= 2**16, facts
    assert facts["loads"].keys() & {"8", "16"}, facts  # of rows, or of positions


def check_quantized(case: Case, facts: dict[str, Any]) -> None:
    assert facts["kernel"] in {kernel for kernel, packed, *_ in PRODUCTS.values() if packed == case["format"]}
    # one program on a processor or more
    assert facts["registers"] * facts["warps"] <= 2**11, facts
    if case["target"] == "sm_100":
        assert facts["chained"] == 0
    # a word or byte of the weight at a time: no block begins at a multiple of four bytes
    assert facts["loads"].get("2", 0) > 4, facts


def check_scaled(case: Case, facts: dict[str, Any]) -> None:
    assert facts["kernel"] in {kernel for kernel, packed, *_ in SCALED.values() if packed == case["format"]}
    assert facts["registers"] * facts["warps"] <= 2**11, facts  # one program on a processor or more
    if facts["kernel"] != "_tiles":  # the codes of a row are read by words
        assert facts["loads"].keys() & {"4", "8", "16"}, facts


# -------------------------------------------------------------------------------------------------------- instructions


def _of_counts() -> dict[str, Case]:
    """Return calls with the most instructions of what a warp, or a thread, has at a time: rows, or elements, times 15 %
    above the fewest that the arithmetic and the accesses of one take.
    """
    rows, convolution = {"shape": [4, 8192, 32, 128]}, {"shape": [2, 8192, 8192]}
    counts: dict[str, tuple[Case, float]] = {
        "merge_attention backward": (rows, 4 * 104),
        "top_k_routing": ({"shape": [32768, 128], "k": 8}, 2 * 312),
        "causal_conv1d": (convolution, 16 * 22.5),
        "causal_conv1d backward": (convolution, 16 * 33),
        "causal_conv1d backward, channels": ({**convolution, "by_channel": True}, 16 * 33),
    }
    same = {"dtype": "bfloat16", "target": "sm_90"}
    return {
        name: {"op": name.partition(",")[0], **case, **same, "most": 1.15 * fewest}
        for name, (case, fewest) in counts.items()
    }


def check_counts(case: Case, facts: dict[str, Any]) -> None:
    assert facts["instructions"] <= case["most"]


FAMILIES = (
    (_of_counts, check_counts),
    (_of_convolution, check_convolution),
    (_of_classes, check_classes),
    (_of_log_probs, check_log_probs),
    (_of_gated, check_gated),
    (_of_gated_norm, check_gated_norm),
    (_of_merge, check_merge),
    (_of_int8, check_int8),
    (_of_modulated, check_modulated),
    (_of_paged, check_paged),
    (_of_quantized, check_quantized),
    (_of_scaled, check_scaled),
    (_of_packed_experts, check_packed_experts),
    (_of_loss, check_loss),
    (_of_rotary, check_rotary),
    (_of_routing, check_routing),
    (_of_sample, check_sample),
    (_of_sparse, check_sparse),
)
#: In names of cases that differ from others in a size alone; test_triton_compile_large.py has products of large sizes.
LONG = ("2**", "-14336-", "-256000-")
CASES = {
    f"{make.__name__[4:]}: {name}": {**case, "long": any(size in name for size in LONG)}
    for make, _ in FAMILIES
    for name, case in make().items()
}


@pytest.mark.parametrize("name", each(CASES))
def test_compiles_well(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    case, facts = CASES[name], compiled[name]
    assert facts["spilled"] <= case.get("spilled", 0)
    assert not facts["float64"] or case.get("float64")
    assert not facts["overflows"]
    assert facts["address_64"]
    check = next(check for make, check in FAMILIES if name.startswith(f"{make.__name__[4:]}: "))
    check(case, facts)

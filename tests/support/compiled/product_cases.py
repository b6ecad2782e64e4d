"""The cases of ``cost_cases.py`` of causal_conv1d, and of ops with products: linear_attention, experts, grouped_matmul.

``launch``: the position among the launches of the call. ``trips``: of each loop of the kernel, in the order of their
addresses. ``busy``: the part of the programs that has work. ``unread``: parameters whose tensors are not read. Each
tensor of the launch moves once: these are the fewest bytes. Where products or taps are the limit, there is no aim for
the issue, and no ``most``: the table holds these kernels where they are.
"""

from __future__ import annotations

from typing import Any

Case = dict[str, Any]

CONV: Case = {"shape": [2, 8192, 8192], "dtype": "bfloat16"}
#: The heads of Qwen3-Next: 32 value heads on 16 key heads of 128; (B, S, Hk, Hv, Dk, Dv).
LINEAR: Case = {"shape": [4, 4096, 16, 32, 128, 128], "dtype": "bfloat16"}
CHUNK, BLOCK = 64, 16
#: (T, E, K, H, I), each expert with as many rows as the others, and the trips over I of the activation's backward. In
#: float16: the products of bfloat16 are torch's on an H100 or H200.
EXPERTS = {"Qwen3-MoE": ([4096, 128, 8, 2048, 768], 768 // 256), "Mixtral": ([4096, 8, 2, 4096, 14336], 14336 // 1024)}
#: The most issue of launches of the experts that only move rows, as of swiglu; of the activation, what it takes now.
ROWS, ACTIVATION = 50, 58
TILE, STEP = 128, 64  # rows and columns of a tile of a product of 16 bits, and the length of a step


def _of_conv() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    # tiles that a program of the backward goes through: of 512 positions, and of 1
    for name, by_channel, tiles in (("", False, 1), (" by channel", True, 128)):
        case: Case = {**CONV, "by_channel": by_channel}
        cases[f"causal_conv1d{name} bfloat16"] = {**case, "op": "causal_conv1d"}
        backward: Case = {**case, "op": "causal_conv1d backward", "trips": [tiles]}
        cases[f"causal_conv1d backward{name} bfloat16"] = backward
    return cases


def _of_linear_attention() -> dict[str, Case]:
    """Return the launches of a call and of its backward, which has those of the first ``chunks`` again."""
    cases: dict[str, Case] = {}
    positions, size = LINEAR["shape"][1], LINEAR["shape"][4]
    walk: Case = {"trips": [positions // CHUNK]}
    for name, beta in (("", True), (" without beta", False)):
        # slices of rows of q and k, the rows of a block's inverse, and the levels above
        parts = [size // 64, BLOCK - 1, (CHUNK // BLOCK).bit_length() - 1] if beta else [size // 64]
        launches: dict[str, Case] = {
            "chunks": {"launch": 0, "trips": parts},
            "walk": {"launch": 1, **walk},
            "backward walk": {"launch": 1, **walk},
            "backward walk back": {"launch": 2, **walk},
            # of columns of the values and, with beta, of slices of rows of k
            "backward scores": {"launch": 3, "trips": [size // 32, size // 64] if beta else [size // 64]},
            "backward chunks": {"launch": 4, "trips": [size // (32 if beta else 64)]},
            "backward heads": {"launch": 5, "trips": [0, 2]},  # four heads at a time, and one at a time
        }
        for launch, case in launches.items():
            op = "linear_attention" + " backward" * launch.startswith("backward")
            cases[f"linear_attention {launch}{name} bfloat16"] = {**LINEAR, "op": op, "beta": beta, **case}
    return cases


def _of_experts() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name, (shape, blocks) in EXPERTS.items():
        tokens, experts, choices, width, inner = shape
        rows = tokens * choices
        # a program for each tile that there may be: ``_first_tile`` of _grouped.py
        tiles: Case = {"busy": rows // TILE / (rows // TILE + experts)}
        to_up, to_down, back = ({**tiles, "trips": [n // STEP]} for n in (width, inner, 2 * inner))
        of_weight: Case = {"trips": [rows // experts // STEP]}
        launches: dict[str, Case] = {
            "spread": {"launch": 2, "most": ROWS},
            "up": {"launch": 3, **to_up},
            "activation": {"launch": 4, "most": ACTIVATION},
            "down": {"launch": 5, **to_down},
            "combine": {"launch": 6, "unread": ["index_ptr"], "most": ROWS},
            "backward spread": {"launch": 2, "most": ROWS},
            "backward down": {"launch": 3, **to_up},
            "backward activation": {"launch": 4, "trips": [blocks], "unread": ["grad_ptr"], "most": ROWS},
            "backward down of weight": {"launch": 5, **of_weight},
            "backward up": {"launch": 6, **back},
            "backward combine": {"launch": 7, "unread": ["index_ptr"], "most": ROWS},
            "backward spread again": {"launch": 8, "most": ROWS},
            "backward up of weight": {"launch": 9, **of_weight},
        }
        for launch, case in launches.items():
            op = "experts" + " backward" * launch.startswith("backward")
            cases[f"experts {name} {launch} float16"] = {"op": op, "shape": shape, "dtype": "float16", **case}
        if name == "Mixtral":
            alone: Case = {"op": "experts alone", "shape": [rows, experts, 1, width, inner], "dtype": "float16"}
            cases[f"grouped_matmul {name} float16"] = {**alone, **to_up}
    return cases


PRODUCT_CASES = _of_conv() | _of_linear_attention() | _of_experts()

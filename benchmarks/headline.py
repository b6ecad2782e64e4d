"""The calls where the time of a model goes, at the sizes of models: ``--sweep headline``, and their table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fusedops import Case

_ROWS = {"x": (32768, 4096), "weight": (4096,)}
_LONG_ROWS = {"x": (16384, 8192), "weight": (8192,)}
_HEADS = (2, 32, 4096, 128)
_PARTS = (4, 32, 8192, 128)
_GROUPED = (2, 8, 4096, 128)
_CONVOLUTION = {"x": (2, 8192, 8192), "weight": (8192, 4), "bias": None, "activation": "silu"}
_GROUPS = {"x": (32768, 2048), "weight": (128, 1536, 2048), "offsets": (128,)}
_DELTA_RULE = {
    "q": (4, 4096, 16, 128), "k": (4, 4096, 16, 128), "v": (4, 4096, 32, 128), "decay": (4, 4096, 32),
    "normalize": True,
}  # fmt: skip

#: By op, the ones that no GPU has timed first. The largest tensors have 2**27 elements or more, several times an L2
#: cache, but where a token is the point.
CALLS: Mapping[str, tuple[Case, ...]] = {
    "linear_attention": (
        Case("Qwen3-Next", {**_DELTA_RULE, "beta": (4, 4096, 32)}),
        Case("without beta", _DELTA_RULE),
        Case(
            "32 tokens",
            {
                "q": (32, 1, 16, 128), "k": (32, 1, 16, 128), "v": (32, 1, 32, 128), "decay": (32, 1, 32),
                "beta": (32, 1, 32), "normalize": True, "initial_state": (32, 32, 128, 128), "return_state": True,
            },
        ),
    ),
    "quantized_linear": (
        Case("Q8_0, a token", {"x": (1, 8192), "packed": (28672, 8704), "format": "Q8_0"}),
        Case("Q4_0, a token", {"x": (1, 8192), "packed": (28672, 4608), "format": "Q4_0"}),
        Case("Q8_0, a prompt", {"x": (4096, 4096), "packed": (4096, 4352), "format": "Q8_0"}),
    ),
    "experts": (
        *(
            Case(
                name,
                {
                    "x": (tokens, 2048), "index": (tokens, 8), "weights": (tokens, 8),
                    "up": (128, 1536, 2048), "down": (128, 2048, 768),
                },
            )
            for name, tokens in (
                ("Qwen3-MoE", 4096), ("Qwen3-MoE, a token", 1), ("Qwen3-MoE, 32", 32), ("Qwen3-MoE, 256", 256),
            )
        ),
        Case(
            "Mixtral",
            {
                "x": (4096, 4096), "index": (4096, 2), "weights": (4096, 2),
                "up": (8, 28672, 4096), "down": (8, 4096, 14336),
            },
        ),
    ),
    "linear_log_probs": (
        Case("Llama 3", {"x": (4096, 4096), "weight": (128256, 4096), "target": (4096,)}),
    ),
    "varlen_attention": (
        Case(
            "8 x 1024",
            {
                "q": (8192, 32, 128), "k": (8192, 8, 128), "v": (8192, 8, 128), "cu_seqlens_q": (9,),
                "causal": "upper_left",
            },
        ),
    ),
    "grouped_matmul": (Case("Qwen3-MoE", _GROUPS), Case("Qwen3-MoE, float16", _GROUPS)),
    "causal_conv1d": (Case("Qwen3-Next", _CONVOLUTION), Case("channels inside", _CONVOLUTION)),
    "bias_dropout_add": (
        Case("4096", {"x": _ROWS["x"], "bias": _ROWS["weight"], "residual": _ROWS["x"], "p": 0.1, "seed": 1}),
    ),
    "bias_dropout": (Case("4096", {"x": _ROWS["x"], "bias": _ROWS["weight"], "p": 0.1, "seed": 1}),),
    "bias_gelu": (Case("16384", {"x": (8192, 16384), "bias": (16384,)}),),
    "rms_norm": (Case("4096", _ROWS), Case("8192", _LONG_ROWS)),
    "add_rms_norm": (Case("4096", {**_ROWS, "residual": _ROWS["x"]}),),
    "layer_norm": (
        Case("4096", {**_ROWS, "bias": _ROWS["weight"]}),
        Case("16384", {"x": (8192, 16384), "weight": (16384,), "bias": (16384,)}),
    ),
    "gated_rms_norm": (
        Case("Qwen3-Next", {"x": (524288, 128), "gate": (524288, 128), "weight": (128,)}),
        Case("Mamba-2", {"x": (16384, 4096), "gate": (16384, 4096), "weight": (4096,), "gate_first": True}),
    ),
    "scaled_masked_softmax": (
        Case("4096", {"x": (1, 32, 1024, 4096)}),
        Case("causal 4096", {"x": (1, 8, 4096, 4096), "scale": 0.125, "causal": True}),
        Case("32768", {"x": (1, 4, 1024, 32768)}),
    ),
    "cross_entropy": (
        Case("32000", {"logits": (8192, 32000), "target": (8192,)}),
        Case("128256", {"logits": (4096, 128256), "target": (4096,)}),
    ),
    "swiglu": (Case("packed", {"gate": (8192, 28672)}),),
    "rotary_embedding": (
        Case("half", {"q": (4, 32, 8192, 128), "k": (4, 8, 8192, 128), "cos": (8192, 64), "sin": (8192, 64)}),
    ),
    "merge_attention": (
        Case(
            "heads of 128",
            {"out_a": _PARTS, "lse_a": _PARTS[:3], "out_b": _PARTS, "lse_b": _PARTS[:3]},
        ),
    ),
    "top_k_routing": (Case("Qwen3-MoE", {"logits": (32768, 128), "k": 8, "normalize": True}),),
    "attention": (
        Case("causal", {"q": _HEADS, "k": _HEADS, "v": _HEADS, "causal": "upper_left"}),
        Case("grouped", {"q": _HEADS, "k": _GROUPED, "v": _GROUPED, "causal": "upper_left"}),
    ),
    "linear_cross_entropy": (
        Case("Llama 3", {"x": (4096, 4096), "weight": (128256, 4096), "target": (4096,)}),
    ),
}  # fmt: skip

#: By op and name: the order of the dims in memory, and the dtype, where it is another one.
ORDERS: Mapping[tuple[str, str], Mapping[str, tuple[int, ...]]] = {
    ("causal_conv1d", "channels inside"): {"x": (0, 2, 1)},
}
DTYPES: Mapping[tuple[str, str], str] = {("grouped_matmul", "Qwen3-MoE, float16"): "float16"}


def _attention(shape: list[int], case: Case) -> int:
    batch, heads, length, size = shape
    return 7 * batch * heads * length * length * size  # causal: half of 2 products forward and 5 backward


def _loss(shape: list[int], case: Case) -> int:
    return 6 * shape[0] * shape[1] * case.args["weight"][0]


def _log_probs(shape: list[int], case: Case) -> int:
    return 8 * shape[0] * shape[1] * case.args["weight"][0]  # backward computes the logits again


def _groups(shape: list[int], case: Case) -> int:
    return 6 * shape[0] * shape[1] * case.args["weight"][1]


def _packed_attention(shape: list[int], case: Case) -> int:
    rows, heads, size = shape
    return 7 * heads * rows * rows // (case.args["cu_seqlens_q"][0] - 1) * size


def _experts(shape: list[int], case: Case) -> int:
    (rows, size), choices, (_, up, _) = shape, case.args["index"][1], case.args["up"]
    return 6 * rows * choices * size * (up + up // 2)


#: The floating point operations of forward and backward, of the ops whose time is that of matrix products.
_OPERATIONS: Mapping[str, Callable[[list[int], Case], int]] = {
    "attention": _attention,
    "linear_cross_entropy": _loss,
    "linear_log_probs": _log_probs,
    "varlen_attention": _packed_attention,
    "grouped_matmul": _groups,
    "experts": _experts,
}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each call and backend: its two times, the limit it is held against, and the others' times.

    Args:
        rows: the measurements of this sweep, as ``--out`` has them.
    """
    calls: dict[tuple[str, str], dict[str, dict[str, dict[str, Any]]]] = {}
    for row in rows:
        calls.setdefault((row["op"], row["case"]), {}).setdefault(row["provider"], {})[row["mode"]] = row
    others = list(dict.fromkeys(row["provider"] for row in rows if not row["provider"].startswith("fusedops.")))
    head = ["call", "backend", "forward us", "backward us", "% of copy", "TFLOP/s", *(f"x {name}" for name in others)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for (op, name), providers in calls.items():
        for provider, modes in providers.items():
            if provider.startswith("fusedops."):
                lines.append(_line(op, name, provider, modes, [providers.get(other, {}) for other in others]))
    return lines


def _line(op: str, name: str, provider: str, modes: dict[str, dict[str, Any]], others: list[dict[str, Any]]) -> str:
    cells = [f"{op}, {name}", provider.removeprefix("fusedops.")]
    cells += [f"{modes[mode]['ms_p50'] * 1e3:.0f}" if mode in modes else "" for mode in ("forward", "backward")]
    if op in _OPERATIONS:
        shape, case = next(iter(modes.values()))["shape"], next(each for each in CALLS[op] if each.name == name)
        whole = len(modes) == 2 and tuple(shape) == next(iter(case.args.values()))  # not a part of it, of a dry run
        cells += ["", f"{_OPERATIONS[op](shape, case) / _milliseconds(modes) / 1e9:.0f}" if whole else ""]
    else:
        cells += [", ".join(f"{row['pct_of_copy']:.0f}" for row in modes.values()), ""]
    cells += [
        f"{_milliseconds(each) / _milliseconds(modes):.2f}" if each.keys() == modes.keys() else "" for each in others
    ]
    return f"| {' | '.join(cells)} |"


def _milliseconds(modes: dict[str, dict[str, Any]]) -> float:
    """Return the time of forward and backward together."""
    return sum(row["ms_p50"] for row in modes.values())

"""Evidence of top_k_routing: cases, tolerances, error bounds, bytes, the unfused form."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows
from fusedops.ops.routing import error_bounds
from fusedops.ops.routing.arguments import TopKRoutingArgs


def unfused(a: TopKRoutingArgs) -> tuple[Tensor, Tensor]:
    """Compute the op as transformers' routers do, by torch.topk."""
    index = a.index
    z = a.logits.float()
    if a.score == "topk_softmax":
        scores = z
    elif a.score == "softmax":
        scores = torch.softmax(z, -1)
    else:
        scores = z.sigmoid() if a.score == "sigmoid" else torch.nn.functional.softplus(z).sqrt()
    if index is None:
        choices = scores if a.bias is None else scores + a.bias
        if a.groups > 1:
            grouped = choices.view(*choices.shape[:-1], a.groups, -1)
            best = grouped.topk(2, -1)[0].sum(-1) if a.group_score == "top2" else grouped.amax(-1)
            kept = torch.zeros_like(best).scatter(-1, best.topk(a.top_groups, -1, sorted=False)[1], 1.0)
            choices = grouped.masked_fill(kept[..., None] == 0, float("-inf")).flatten(-2)
        index = choices.topk(a.k, -1)[1]
    weights = scores.gather(-1, index)
    if a.score == "topk_softmax":
        weights = torch.softmax(weights, -1)
    if a.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + a.eps)
    return weights * a.scale, index


def min_bytes(logits: Any, k: int, *rest: Any) -> Mapping[Any, int]:
    """Read the logits, write weights and index; backward reads the logits, what it gets of both, and writes."""
    size = prod(logits.shape) * logits.dtype.itemsize
    chosen = prod(logits.shape[:-1]) * k * 12
    return {"forward": size + chosen, "backward": 2 * size + chosen}


_DEEPSEEK_V3 = {"score": "sigmoid", "groups": 8, "top_groups": 4, "normalize": True, "eps": 1e-20, "scale": 2.5}


def _case(name: str, rows: tuple[int, ...], experts: int, k: int, source: str, **options: Any) -> Case:
    """Return a case; ``bias=True`` and ``index=True`` give them their shapes."""
    if options.pop("bias", False):
        options["bias"] = (experts,)
    if options.pop("index", False):
        options["index"] = (*rows, k)
    return Case(name, {"logits": (*rows, experts), "k": k, **options}, source)


_ROW_DIMS: dict[str, int] = dict.fromkeys(("logits", "weights", "chosen"), 0)


def _grouped_rows(count: int) -> Mapping[str, Any]:
    return {"logits": (count, 64), "k": 6, "bias": (64,), "score": "sigmoid", "groups": 8, "top_groups": 4}


TOP_K_ROUTING = Evidence(
    formula="scale * s / (sum(s) + eps), s the k scores of the largest score + bias",
    cases=[
        _case(
            "biased", (9,), 12, 3, "DeepSeek-V3, smaller", bias=True, **{**_DEEPSEEK_V3, "groups": 3, "top_groups": 2}
        ),
        _case("given", (9,), 16, 4, "DeepSeek-V4, given experts", score="sqrt_softplus", index=True, normalize=True),
        _case("mixtral", (7,), 8, 2, "Mixtral 8x7B", normalize=True),
        _case("qwen3_moe", (4, 5), 128, 8, "Qwen3-MoE", normalize=True),
        _case("gpt_oss", (11,), 32, 4, "gpt-oss", score="topk_softmax"),
        _case("deepseek_v2", (6,), 160, 6, "DeepSeek-V2", groups=8, top_groups=3, group_score="max", scale=16.0),
        _case("deepseek_v3", (5,), 256, 8, "DeepSeek-V3", bias=True, **_DEEPSEEK_V3),
        _case("minimax", (3,), 33, 5, "no size is a power of two", score="sigmoid", bias=True, normalize=True),
        _case("replay", (5,), 17, 3, "given experts, a softmax", index=True),
    ],
    tolerance=error_bounds.TOLERANCE,
    gradient_tolerance=error_bounds.TOLERANCE,
    error_bound=error_bounds.weights_error_bound,
    gradient_error_bound=error_bounds.logits_error_bound,
    pin_choice=error_bounds.pin_choice,
    min_bytes=min_bytes,
    unfused=unfused,
    sample=lambda batch, length: {
        "logits": (batch, length, 8),
        "k": 3,
        "bias": (8,),
        "score": "sigmoid",
        "normalize": True,
    },
    large=[
        _case("Mixtral, 2048 tokens", (2048,), 8, 2, "", normalize=True),
        _case("Qwen3-MoE, 2048 tokens", (2048,), 128, 8, "", normalize=True),
        _case("DeepSeek-V3, 2048 tokens", (2048,), 256, 8, "", bias=True, **_DEEPSEEK_V3),
    ],
    sweep=lambda rows, width: {"logits": (rows, width), "k": min(8, width), "normalize": True},
    rows=[
        Rows("tokens", lambda count: {"logits": (count, 12), "k": 3, "normalize": True}, _ROW_DIMS),
        Rows("tokens in groups", _grouped_rows, _ROW_DIMS),
    ],
    sharded=("the dims of `logits` but the last", "`index` as `logits`; `bias` whole", "as `logits`"),
)

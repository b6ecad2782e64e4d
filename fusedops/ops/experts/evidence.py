"""Evidence of experts and grouped_matmul: cases, tolerances, error bounds, bytes, the unfused form."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows
from fusedops.ops.experts import error_bounds
from fusedops.ops.experts.arguments import ExpertsArgs, QuantizedExpertsArgs
from fusedops.ops.experts.formulas import Activation, Lora, experts_of, loras_of
from fusedops.ops.experts.quantized_experts import with_unpacked
from fusedops.quantization import SCALED, bytes_of_row


def unfused(a: ExpertsArgs) -> Tensor:
    """Compute the op as transformers' loop over experts does."""
    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    total = torch.zeros_like(a.x)
    chosen = experts_of(a.index, a.up.shape[0]).view(a.index.shape)
    every: list[int] = cast("Any", chosen.unique()).tolist()
    for e in every:
        if e == a.up.shape[0]:
            continue
        token, choice = torch.where(chosen == e)
        first, second = (
            _merged(each[e].t() if a.transposed else each[e], lora, e)
            for each, lora in zip((a.up, a.down), loras_of(a))
        )
        h = torch.nn.functional.linear(a.x[token], first, None if a.up_bias is None else a.up_bias[e])
        out = torch.nn.functional.linear(act(h), second, None if a.down_bias is None else a.down_bias[e])
        total.index_add_(0, token, (out * a.weights[token, choice, None]).to(a.x.dtype))
    return total


def _merged(weight: Tensor, lora: Lora, e: int) -> Tensor:
    """Return the sum of the weight of an expert and its factors, as PEFT builds it."""
    if lora.a is None or lora.b is None:
        return weight
    return torch.addmm(weight, lora.b[e].to(weight.dtype), lora.a[e].to(weight.dtype), alpha=lora.scale)


def min_bytes(x: Any, index: Any, weights: Any, up: Any, down: Any, *rest: Any) -> Mapping[Any, int]:
    """Read the tokens and the weights of the chosen experts, at most all; write the tokens. Backward: the same twice,
    and the gradients of the weights.
    """
    tokens = prod(x.shape) * x.dtype.itemsize
    share = min(1.0, prod(index.shape) / max(up.shape[0], 1))
    parts = [each for each in (up, down, *rest[-5:-1]) if each is not None]
    of_weights = int(share * sum(prod(each.shape) * each.dtype.itemsize for each in parts))
    return {"forward": 2 * tokens + of_weights, "backward": 3 * tokens + 2 * of_weights}


def _sizes(t: int, e: int, k: int, h: int, i: int, **options: Any) -> dict[str, Any]:
    """Return the call of T tokens and E experts, of which each token has K."""
    gated = options.get("activation", "swiglu") in ("swiglu", "geglu", "geglu_tanh")
    up, down = (e, 2 * i if gated else i, h), (e, h, i)
    if options.get("transposed"):
        up, down = (e, h, up[1]), (e, i, h)
    return {"x": (t, h), "index": (t, k), "weights": (t, k), "up": up, "down": down, **options}


def _with_lora(rank: int, **call: Any) -> dict[str, Any]:
    """Return the call with factors of LoRA of that rank."""
    e, width = call["up"][0], call["x"][1]
    rows = call["up"][2 if call.get("transposed") else 1]
    inner = rows // 2 if call.get("activation", "swiglu") in ("swiglu", "geglu", "geglu_tanh") else rows
    factors = {"up_lora": (e, rank, width), "up_lora_b": (e, rows, rank)}
    factors |= {"down_lora": (e, rank, inner), "down_lora_b": (e, width, rank)}
    return {**call, **factors, "lora_scale": 0.5}


def _with_biases(**call: Any) -> dict[str, Any]:
    up, down, transposed = call["up"], call["down"], call.get("transposed", False)
    at = 2 if transposed else 1
    return {**call, "up_bias": (up[0], up[at]), "down_bias": (down[0], down[at])}


_GPT_OSS = {"limit": 7.0, "alpha": 1.702, "offset": 1.0, "interleaved": True, "transposed": True}


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    return _with_biases(**_sizes(batch * length, 4, 2, 6, 4))


_PEERS = """
| peer | devices | rows of no expert | an expert without tokens | sum over k |
|---|---|---|---|---|
| transformers, `grouped_mm` | any | undefined, masked where expert parallelism is on | gradient undefined | the \
dtype of x, then float32 |
| transformers, `eager` | any | skipped | gradient 0 | `index_add_` in the dtype of x |
| torch, `F.grouped_mm` | CPU, CUDA | undefined | gradient undefined | |
| Liger, `fused_moe` | CUDA, Ascend | undefined | gradient 0 | float32 |
| fusedops | any | 0, gradient 0 | gradient 0 | float32, in the order of k |
"""


def _token_rows(count: int) -> Mapping[str, Any]:
    return _with_biases(**_sizes(count, 5, 2, 33, 20))


def _wide_token_rows(count: int) -> Mapping[str, Any]:
    return _sizes(count, 3, 1, 1500, 700, activation="gelu_tanh")


EXPERTS = Evidence(
    formula="sum over k of weights[k] * down[e] @ act(up[e] @ x)",
    cases=[
        Case("lora", _with_lora(2, **_with_biases(**_sizes(7, 3, 2, 10, 6, **_GPT_OSS))), "every argument, small"),
        Case("biases", _with_biases(**_sizes(6, 3, 2, 8, 6)), "every argument but LoRA, small"),
        Case("mixtral", _sizes(24, 4, 2, 64, 48), "Mixtral 8x7B, smaller"),
        Case("qwen3_moe", _sizes(20, 8, 4, 48, 16), "Qwen3-MoE, smaller: many narrow experts"),
        Case("gpt_oss", _with_biases(**_sizes(12, 4, 4, 48, 40, **_GPT_OSS)), "gpt-oss, smaller"),
        Case("decode", _sizes(1, 8, 2, 64, 48), "one token"),
        Case("geglu", _sizes(9, 3, 2, 40, 24, activation="geglu_tanh"), "Gemma 4"),
        Case("relu2", _sizes(9, 3, 2, 40, 24, activation="relu2"), "Nemotron-H, without a gate"),
        Case("ragged", _with_biases(**_sizes(7, 3, 3, 33, 13, activation="gelu")), "no size is a power of two"),
    ],
    tolerance=error_bounds.TOLERANCE,
    gradient_tolerance=error_bounds.GRADIENT_TOLERANCE,
    error_bound=error_bounds.experts_error_bound,
    gradient_error_bound=error_bounds.experts_gradient_error_bound,
    min_bytes=min_bytes,
    unfused=unfused,
    sample=_sample,
    large=[
        Case("mixtral, 64 tokens", _sizes(64, 8, 2, 1024, 2048)),
        Case("qwen3-moe, 2048 tokens", _sizes(2048, 64, 8, 512, 256)),
    ],
    sweep=lambda rows, width: _sizes(rows, 8, 2, width, width),
    rows=[
        Rows("tokens", _token_rows, dict.fromkeys(("x", "index", "weights", "y"), 0)),
        Rows("wide tokens", _wide_token_rows, dict.fromkeys(("x", "index", "weights", "y"), 0)),
    ],
    peers=_PEERS,
    sharded=(
        "the tokens of `x`; or the experts, the first dim of `up`",
        "tokens: `index` and `weights` likewise, the weights of experts whole; experts: `down` and the biases as `up`, "
        "the others whole",
        "tokens: of `x` and `weights` as they are, of the weights of experts `Partial`; experts: the output and the "
        "gradients of `x` and `weights` are `Partial`, those of the weights of experts as they are",
    ),
)


# -------------------------------------------------------------------------------------------------- quantized_experts


def _unfused_packed(a: QuantizedExpertsArgs) -> Tensor:
    """Compute the op as models do without fused ops: the weights of all experts are unpacked."""
    args = with_unpacked(a)
    return unfused(args._replace(up=args.up.to(a.x.dtype), down=args.down.to(a.x.dtype)))


def _packed_min_bytes(x: Any, index: Any, weights: Any, up: Any, down: Any, *rest: Any) -> Mapping[Any, int]:
    """Read the tokens and the codes and scales of the chosen experts; write the tokens. Backward: the same twice."""
    tokens = prod(x.shape) * x.dtype.itemsize
    share = min(1.0, prod(index.shape) / max(up.shape[0], 1))
    parts = [each for each in (up, down, *rest[9:-1]) if each is not None]
    of_weights = int(share * sum(prod(each.shape) * each.dtype.itemsize for each in parts))
    return {"forward": 2 * tokens + of_weights, "backward": 3 * tokens + 2 * of_weights}


def _packed(t: int, e: int, k: int, h: int, i: int, format: str, groups: int = 0, **options: Any) -> dict[str, Any]:
    """Return the call of T tokens and E experts with codes; ``groups``: of a row, with zeros."""
    call = _sizes(t, e, k, h, i, **options)
    for name in ("up", "down"):
        _, rows, columns = call[name]
        call |= {name: (e, rows, bytes_of_row(columns, format)), f"{name}_format": format}
        if format in SCALED:
            call[f"{name}_scales"] = (e, *SCALED[format].scales_shape(rows, columns, groups))
            call |= {f"{name}_global_scale": (e,)} if SCALED[format].global_scale else {}
            call |= {f"{name}_zeros": call[f"{name}_scales"]} if groups else {}
    return call


def _packed_token_rows(count: int) -> Mapping[str, Any]:
    return _with_biases(**_packed(count, 5, 2, 96, 160, "MXFP4"))


def _packed_sample(batch: int, length: int) -> Mapping[str, Any]:
    return _with_biases(**_packed(batch * length, 4, 2, 32, 32, "Q8_0"))


def _packed_sweep(rows: int, width: int) -> Mapping[str, Any]:
    columns = max(width // 32, 1) * 32
    return _packed(rows, 8, 2, columns, columns, "Q8_0")


_PACKED_OSS: dict[str, Any] = {"limit": 7.0, "alpha": 1.702, "offset": 1.0, "interleaved": True}
QUANTIZED_EXPERTS = Evidence(
    formula="sum over k of weights[k] * unpack(down)[e] @ act(unpack(up)[e] @ x)",
    cases=[
        Case("biases", _with_lora(4, **_with_biases(**_packed(6, 3, 3, 64, 64, "INT4_GROUP", 2))), "every argument"),
        Case("lora", _with_lora(8, **_packed(9, 3, 2, 64, 96, "MXFP4", activation="gelu")), "without a gate"),
        Case("gpt_oss", _with_biases(**_packed(12, 4, 4, 96, 64, "MXFP4", **_PACKED_OSS)), "gpt-oss, smaller"),
        Case("qwen3_moe", _packed(20, 8, 4, 256, 256, "Q4_K"), "Qwen3-MoE, smaller: many narrow experts"),
        Case("deepseek_v3", _packed(9, 4, 2, 160, 96, "FP8_BLOCK"), "DeepSeek-V3, smaller: last blocks are partial"),
        Case("a_global_scale", _packed(5, 3, 2, 64, 48, "NVFP4"), "one for each expert"),
        Case("decode", _packed(1, 8, 2, 64, 96, "MXFP4"), "one token"),
        Case("relu2", _with_biases(**_packed(9, 3, 2, 64, 64, "Q8_0", activation="relu2")), "without a gate"),
        Case("any_size", _packed(5, 3, 2, 40, 24, "FP8_ROW", activation="silu"), "no size is that of a block"),
    ],
    tolerance=error_bounds.TOLERANCE,
    gradient_tolerance=error_bounds.GRADIENT_TOLERANCE,
    error_bound=error_bounds.quantized_experts_error_bound,
    gradient_error_bound=error_bounds.quantized_experts_gradient_error_bound,
    min_bytes=_packed_min_bytes,
    unfused=_unfused_packed,
    sample=_packed_sample,
    large=[
        Case("relu2, 64 tokens", _packed(64, 32, 4, 1024, 1024, "MXFP4", activation="relu2")),
        Case("gpt-oss, half as wide, 1 token", _with_biases(**_packed(1, 32, 4, 1440, 1440, "MXFP4", **_PACKED_OSS))),
    ],
    sweep=_packed_sweep,
    rows=[Rows("tokens", _packed_token_rows, dict.fromkeys(("x", "index", "weights", "y"), 0))],
    peers="""
| peer | activation | devices | biases | backward |
|---|---|---|---|---|
| transformers, MXFP4 by its Hub kernel | 16 bits | CUDA, XPU | yes | no |
| transformers, where that does not run | exact; all weights are unpacked | any | yes | yes |
| transformers, `FP8Experts` | rounded to 8 bits | CUDA | no | by unpacked weights |
| llama.cpp, `mul_mat_id` | rounded to 8 bits | any | yes | no |
| fusedops | exact | any | yes | of x, weights, biases and factors of LoRA |
""",
    sharded=EXPERTS.sharded,
)


# ----------------------------------------------------------------------------------------------------- grouped_matmul


def unfused_groups(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Compute the op as a loop over the groups does."""
    parts: list[Tensor] = []
    start, ends = 0, cast("list[int]", cast("Any", offsets).tolist())
    for e, end in enumerate(ends):
        each = weight[e].t() if transposed else weight[e]
        parts.append(torch.nn.functional.linear(x[start:end], each, None if bias is None else bias[e]))
        start = end
    parts.append(x.new_zeros(x.shape[0] - start, weight.shape[2 if transposed else 1]))
    return torch.cat(parts)


def min_bytes_of_groups(x: Any, weight: Any, offsets: Any, bias: Any, transposed: bool) -> Mapping[Any, int]:
    """Read the rows and the weights, at most one for each row; write the rows. Backward: read the rows and their
    gradients, write those of x, read the weights and write their gradients.
    """
    size = x.dtype.itemsize
    rows, outputs = prod(x.shape) * size, x.shape[0] * weight.shape[2 if transposed else 1] * size
    share = min(1.0, x.shape[0] / max(weight.shape[0], 1))
    of_weights = int(share * prod(weight.shape) * weight.dtype.itemsize)
    return {"forward": rows + outputs + of_weights, "backward": 2 * rows + outputs + 2 * of_weights}


def _groups(rows: int, experts: int, outputs: int, columns: int, **options: Any) -> dict[str, Any]:
    """Return the call of S rows of K columns and E weights of N outputs; ``bias=True`` gives the bias its shape."""
    weight = (experts, columns, outputs) if options.get("transposed") else (experts, outputs, columns)
    bias = {"bias": (experts, outputs)} if options.pop("bias", False) else {}
    return {"x": (rows, columns), "weight": weight, "offsets": (experts,), **bias, **options}


GROUPED_MATMUL = Evidence(
    formula="x[i] @ weight[e].T + bias[e], i a row of group e",
    cases=[
        Case("bias", _groups(11, 4, 5, 6, bias=True), "every argument, small"),
        Case("mixtral", _groups(24, 4, 96, 64), "Mixtral 8x7B, smaller"),
        Case("qwen3_moe", _groups(30, 16, 32, 48), "Qwen3-MoE, smaller: many narrow experts"),
        Case("gpt_oss", _groups(12, 4, 80, 48, bias=True, transposed=True), "gpt-oss, smaller"),
        Case("decode", _groups(2, 8, 48, 64), "one token of two experts"),
        Case("one", _groups(9, 1, 16, 24, bias=True), "one expert"),
        Case("ragged", _groups(7, 3, 13, 33, bias=True), "no size is a power of two"),
    ],
    tolerance=error_bounds.TOLERANCE,
    gradient_tolerance=error_bounds.GRADIENT_TOLERANCE,
    error_bound=error_bounds.grouped_error_bound,
    gradient_error_bound=error_bounds.grouped_gradient_error_bound,
    min_bytes=min_bytes_of_groups,
    unfused=unfused_groups,
    sample=lambda batch, length: _groups(batch * length, 4, 5, 6, bias=True),
    large=[
        Case("mixtral, 128 rows", _groups(128, 8, 2048, 1024)),
        Case("qwen3-moe, 4096 rows", _groups(4096, 64, 512, 512)),
    ],
    sweep=lambda rows, width: _groups(rows, 8, width, width),
    sharded=(
        "none; the outputs, the dim N of `weight`",
        "`bias` as `weight`; `x` and `offsets` replicated",
        "of x: `Partial` with sharded outputs; of weight and bias: as they are",
    ),
)

"""Evidence of the norms: cases, tolerances, error bounds, bytes, the unfused forms."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows, rows_of_two_widths, tolerances
from fusedops.dtypes import promoted
from fusedops.ops.norms import error_bounds
from fusedops.ops.norms.arguments import AddLayerNormArgs, AddRmsNormArgs, GatedRmsNormArgs

_SHARDED = (
    "any dim except the last",
    "`weight`, `bias` replicated",
    "of x: as x; of weight and bias with a sharded x: `Partial`",
)
_SUM_ROWS = ("x", "residual", "y", "s")
_SUM_SHARDED = (
    "any dim except the last",
    "`residual` as x; `weight`, `bias` replicated",
    "of x and residual: as x; of weight and bias with a sharded x: `Partial`; both outputs as x",
)


def _row_bytes(x: Any, dtypes: tuple[torch.dtype, ...], vectors: tuple[Any, ...]) -> int:
    """Return the bytes of tensors of the shape of x, of these dtypes, and of the weight and bias that are not None."""
    small = sum(prod(vector.shape) * vector.dtype.itemsize for vector in vectors if vector is not None)
    return prod(x.shape) * sum(dtype.itemsize for dtype in dtypes) + small


# ------------------------------------------------------------------------------------------------------------ rms_norm


def rms_norm_unfused(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """Compute the op as models do without fused ops."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) if weight is None else (y * (offset + weight.float())).to(x.dtype)


def rms_norm_min_bytes(x: Any, weight: Any, eps: float, offset: float) -> Mapping[Any, int]:
    """Read x, write y; read grad and x, write dx. The weight, and its gradient, are read and written once."""
    return {
        "forward": _row_bytes(x, (x.dtype,) * 2, (weight,)),
        "backward": _row_bytes(x, (x.dtype,) * 3, (weight,) * 2),
    }


RMS_NORM = Evidence(
    formula="x * rsqrt(mean(x**2) + eps) * (offset + weight)",
    cases=[
        Case("llama_3_8b", {"x": (2048, 4096), "weight": (4096,), "eps": 1e-5}, "Llama 3 8B, one sequence"),
        Case("gemma_2b", {"x": (2, 512, 2048), "weight": (2048,), "offset": 1.0}, "Gemma 2B, weight stored minus 1"),
        Case("qwen_3_head", {"x": (4, 16, 64, 128), "weight": (128,)}, "Qwen 3, the norm of each query head"),
        Case("ragged", {"x": (3, 1001), "weight": (1001,), "eps": 1e-3}, "no size is a power of two"),
        Case("no_weight", {"x": (4, 96)}),
    ],
    tolerance=error_bounds.TOLERANCE,
    gradient_tolerance=error_bounds.GRADIENT_TOLERANCE,
    error_bound=error_bounds.rms_norm_error_bound,
    gradient_error_bound=error_bounds.rms_norm_gradient_error_bound,
    min_bytes=rms_norm_min_bytes,
    unfused=rms_norm_unfused,
    sample=lambda batch, length: {"x": (batch, length, 6), "weight": (6,), "eps": 1e-5},
    large=[Case("training", {"x": (8192, 4096), "weight": (4096,)})],
    sweep=lambda rows, width: {"x": (rows, width), "weight": (width,)},
    rows=rows_of_two_widths(lambda count, width: {"x": (count, width), "weight": (width,)}, "x", "y"),
    peers="""
| peer | rounded | weight | offset |
|---|---|---|---|
| transformers, `LlamaRMSNorm` | before the weight and after it | needed | none |
| transformers, `GemmaRMSNorm` | once | needed | 1 |
| torch, `rms_norm` | once | optional | none |
| Liger, `LigerRMSNorm` | by `casting_mode` | optional | any; backward writes into grad by default |
| torch_npu, `npu_rms_norm` | once | needed | none |
| fusedops | once | optional | any |
""",
    sharded=_SHARDED,
)


# ---------------------------------------------------------------------------------------------------------- layer_norm


def layer_norm_unfused(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute the op as models do without fused ops: torch has it as one op."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def layer_norm_min_bytes(x: Any, weight: Any, bias: Any, eps: float) -> Mapping[Any, int]:
    """Read x, write y; read grad and x, write dx. Weight, bias and their gradients are read and written once."""
    return {
        "forward": _row_bytes(x, (x.dtype,) * 2, (weight, bias)),
        "backward": _row_bytes(x, (x.dtype,) * 3, (weight, weight, bias)),
    }


LAYER_NORM = Evidence(
    formula="(x - mean(x)) * rsqrt(var(x) + eps) * weight + bias",
    cases=[
        Case("gpt2_xl", {"x": (2, 1024, 1600), "weight": (1600,), "bias": (1600,)}, "GPT-2 XL"),
        Case("bert_base", {"x": (8, 512, 768), "weight": (768,), "bias": (768,), "eps": 1e-12}, "BERT-base"),
        Case("command_r", {"x": (256, 8192), "weight": (8192,)}, "Command R, without a bias"),
        Case("olmo", {"x": (512, 2048)}, "OLMo, without weight and bias"),
        Case("ragged", {"x": (3, 1001), "weight": (1001,), "bias": (1001,), "eps": 1e-3}, "no size is a power of two"),
    ],
    tolerance=error_bounds.TOLERANCE,
    gradient_tolerance=error_bounds.GRADIENT_TOLERANCE,
    error_bound=error_bounds.layer_norm_error_bound,
    gradient_error_bound=error_bounds.layer_norm_gradient_error_bound,
    min_bytes=layer_norm_min_bytes,
    unfused=layer_norm_unfused,
    sample=lambda batch, length: {"x": (batch, length, 6), "weight": (6,), "bias": (6,)},
    large=[Case("training", {"x": (8192, 4096), "weight": (4096,), "bias": (4096,)})],
    sweep=lambda rows, width: {"x": (rows, width), "weight": (width,), "bias": (width,)},
    rows=rows_of_two_widths(lambda count, width: {"x": (count, width), "weight": (width,), "bias": (width,)}, "x", "y"),
    sharded=_SHARDED,
)


# -------------------------------------------------------------------------------------------------------- add_rms_norm


def add_rms_norm_unfused(a: AddRmsNormArgs) -> tuple[Tensor, Tensor]:
    """Compute the op as models do without fused ops."""
    s = a.x + a.residual
    return rms_norm_unfused(s, a.weight, a.eps, a.offset).to(a.x.dtype), s


def add_rms_norm_min_bytes(a: AddRmsNormArgs) -> Mapping[Any, int]:
    """Read x and residual, write y and s; read s and both gradients, write one or, of two dtypes, both."""
    s = promoted(a.x, a.residual)
    return {
        "forward": _row_bytes(a.x, (a.x.dtype, a.residual.dtype, a.x.dtype, s), (a.weight,)),
        "backward": _row_bytes(a.x, (s, s, a.x.dtype, *{a.x.dtype, a.residual.dtype}), (a.weight,) * 2),
    }


ADD_RMS_NORM = Evidence(
    formula="s = x + residual, s * rsqrt(mean(s**2) + eps) * (offset + weight)",
    cases=[Case(case.name, {**case.args, "residual": case.args["x"]}, case.source) for case in RMS_NORM.cases],
    tolerance=error_bounds.TOLERANCE,
    gradient_tolerance=error_bounds.GRADIENT_TOLERANCE,
    error_bound=error_bounds.add_rms_norm_error_bound,
    gradient_error_bound=error_bounds.add_rms_norm_gradient_error_bound,
    min_bytes=add_rms_norm_min_bytes,
    unfused=add_rms_norm_unfused,
    sample=lambda batch, length: {"x": (batch, length, 6), "residual": (batch, length, 6), "weight": (6,)},
    large=[Case("training", {"x": (8192, 4096), "residual": (8192, 4096), "weight": (4096,)})],
    sweep=lambda rows, width: {"x": (rows, width), "residual": (rows, width), "weight": (width,)},
    rows=rows_of_two_widths(
        lambda count, width: {"x": (count, width), "residual": (count, width), "weight": (width,)}, *_SUM_ROWS
    ),
    peers="""
| peer | the norm is of | dtype of s |
|---|---|---|
| transformers, decoder layers | the rounded sum | the stream's |
| Liger, `LigerFusedAddRMSNormFunction` | the rounded sum | x's |
| quack, flash-attention | the sum before rounding | x's, or float32 |
| torch_npu, `npu_add_rms_norm` | by shape the one or the other; no backward | x's |
| fusedops | the rounded sum | as torch promotes |
""",
    sharded=_SUM_SHARDED,
)


# ------------------------------------------------------------------------------------------------------ add_layer_norm


def add_layer_norm_unfused(a: AddLayerNormArgs) -> tuple[Tensor, Tensor]:
    """Compute the op as models do without fused ops."""
    s = a.x + a.residual
    return layer_norm_unfused(s, a.weight, a.bias, a.eps).to(a.x.dtype), s


def add_layer_norm_min_bytes(a: AddLayerNormArgs) -> Mapping[Any, int]:
    """Read x and residual, write y and s; read s and both gradients, write one or, of two dtypes, both."""
    s = promoted(a.x, a.residual)
    return {
        "forward": _row_bytes(a.x, (a.x.dtype, a.residual.dtype, a.x.dtype, s), (a.weight, a.bias)),
        "backward": _row_bytes(a.x, (s, s, a.x.dtype, *{a.x.dtype, a.residual.dtype}), (a.weight, a.weight, a.bias)),
    }


ADD_LAYER_NORM_LARGE = (8192, 4096)


ADD_LAYER_NORM = Evidence(
    formula="s = x + residual, (s - mean(s)) * rsqrt(var(s) + eps) * weight + bias",
    cases=[Case(case.name, {**case.args, "residual": case.args["x"]}, case.source) for case in LAYER_NORM.cases],
    tolerance=error_bounds.TOLERANCE,
    gradient_tolerance=error_bounds.GRADIENT_TOLERANCE,
    error_bound=error_bounds.add_layer_norm_error_bound,
    gradient_error_bound=error_bounds.add_layer_norm_gradient_error_bound,
    min_bytes=add_layer_norm_min_bytes,
    unfused=add_layer_norm_unfused,
    sample=lambda batch, length: {
        "x": (batch, length, 6),
        "residual": (batch, length, 6),
        "weight": (6,),
        "bias": (6,),
    },
    large=[
        Case(
            "training",
            {"x": ADD_LAYER_NORM_LARGE, "residual": ADD_LAYER_NORM_LARGE, "weight": (4096,), "bias": (4096,)},
        )
    ],
    sweep=lambda rows, width: {"x": (rows, width), "residual": (rows, width), "weight": (width,), "bias": (width,)},
    rows=rows_of_two_widths(
        lambda count, width: {
            "x": (count, width),
            "residual": (count, width),
            "weight": (width,),
            "bias": (width,),
        },
        *_SUM_ROWS,
    ),
    sharded=_SUM_SHARDED,
)


# ------------------------------------------------------------------------------------------------------ gated_rms_norm


def gated_rms_norm_unfused(a: GatedRmsNormArgs) -> Tensor:
    """Compute the op as models do without fused ops."""
    act = getattr(torch.nn.functional, a.activation)(a.gate.float())
    y = a.x.float() * act if a.gate_first else a.x.float()
    y = y.view(*y.shape[:-1], a.groups, -1)
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + a.eps)).view(a.x.shape)
    y = y if a.weight is None else y * (a.offset + a.weight.float())
    return (y if a.gate_first else y * act).to(a.x.dtype)


def gated_rms_norm_min_bytes(x: Any, gate: Any, weight: Any, *rest: Any) -> Mapping[Any, int]:
    """Read x and gate, write y; read grad, x and gate, write dx and dgate. The weight as in rms_norm."""
    pair = (x.dtype, gate.dtype)
    return {
        "forward": _row_bytes(x, (*pair, x.dtype), (weight,)),
        "backward": _row_bytes(x, (*pair, *pair, x.dtype), (weight,) * 2),
    }


def _gated_case(name: str, shape: tuple[int, ...], source: str = "", **options: Any) -> Case:
    return Case(name, {"x": shape, "gate": shape, "weight": shape[-1:], **options}, source)


def _gated_rows(count: int, width: int) -> Mapping[str, Any]:
    return {"x": (count, width), "gate": (count, width), "weight": (width,)}


def _grouped_rows(count: int) -> Mapping[str, Any]:
    return {**_gated_rows(count, 66), "gate_first": True, "groups": 2}


GATED_RMS_NORM = Evidence(
    formula="rms_norm(x) * act(gate), or rms_norm(x * act(gate))",
    cases=[
        _gated_case("qwen_3_next", (1024, 32, 128), "Qwen3-Next 80B, the norm of each value head"),
        _gated_case("kimi_linear", (512, 32, 128), "Kimi Linear 48B", activation="sigmoid", eps=1e-5),
        _gated_case("granite_4", (512, 3072), "Granite 4 tiny, Mamba-2 layers", gate_first=True, eps=1e-5),
        _gated_case("nemotron_h", (256, 8192), "Nemotron-H 8B", gate_first=True, groups=8, eps=1e-5),
        _gated_case("ragged", (3, 1001), "no size is a power of two", groups=7, offset=1.0, eps=1e-3),
        Case("no_weight", {"x": (4, 96), "gate": (4, 96), "gate_first": True, "activation": "sigmoid"}),
    ],
    tolerance=tolerances((1e-6, 1e-5), (1e-14, 1e-12)),
    gradient_tolerance=tolerances((1e-6, 2e-5), (1e-14, 1e-12)),
    error_bound=error_bounds.gated_rms_norm_error_bound,
    gradient_error_bound=error_bounds.gated_rms_norm_gradient_error_bound,
    min_bytes=gated_rms_norm_min_bytes,
    unfused=gated_rms_norm_unfused,
    sample=lambda batch, length: {
        "x": (batch, length, 6),
        "gate": (batch, length, 6),
        "weight": (6,),
        "gate_first": True,
        "groups": 2,
    },
    large=[
        _gated_case("norm first", (8192, 4096)),
        _gated_case("gate first, 8 groups", (8192, 4096), gate_first=True, groups=8),
    ],
    sweep=lambda rows, width: {"x": (rows, width), "gate": (rows, width), "weight": (width,)},
    rows=[
        *rows_of_two_widths(_gated_rows, "x", "gate", "y"),
        Rows("rows, gate first, 2 groups", _grouped_rows, dict.fromkeys(("x", "gate", "y"), 0)),
    ],
    peers="""
| peer | order | activation | groups | rounded |
|---|---|---|---|---|
| transformers, `Qwen3NextRMSNormGated` | norm first | silu | 1 | before the weight and after the gate |
| transformers, `MambaRMSNormGated` | gate first | silu | 1 | before the weight and after it |
| transformers, `Zamba2RMSNormGated` | gate first | silu | any | before the weight and after it |
| mamba_ssm, `RMSNormGated` | both | silu | any | once |
| flash-linear-attention, `FusedRMSNormGated` | norm first | silu or sigmoid | 1 | once |
| fusedops | both | silu or sigmoid | any | once |
""",
    sharded=(
        "any dim except the last",
        "`gate` as x; `weight` replicated",
        "of x and gate: as x; of weight with a sharded x: `Partial`",
    ),
)

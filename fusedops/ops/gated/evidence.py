"""Evidence of the gated activations: cases, tolerances, error bounds, bytes, the unfused forms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows, Tolerance
from fusedops._contract.rounding import error_bound_of
from fusedops.dtypes import promoted
from fusedops.ops.gated import geglu, swiglu
from fusedops.ops.gated.error_bounds import gradient_error_bound_of
from fusedops.ops.gated.formulas import split


def _min_bytes(gate: Any, up: Any, *rest: Any) -> Mapping[Any, int]:
    """Read gate and up, write y; read grad, gate and up, write their gradients."""
    elements = math.prod(gate.shape) // (1 if up is not None else 2)
    inputs = math.prod(gate.shape) * (gate.dtype.itemsize + (0 if up is None else up.dtype.itemsize))
    output = elements * promoted(gate, up).itemsize
    return {"forward": inputs + output, "backward": 2 * inputs + output}


# -------------------------------------------------------------------------------------------------------------- swiglu


def swiglu_unfused(
    gate: Tensor, up: Tensor | None, limit: float | None, alpha: float, offset: float, interleaved: bool
) -> Tensor:
    """Compute the op as models do without fused ops."""
    g, u = split(gate, interleaved) if up is None else (gate, up)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    activated = torch.nn.functional.silu(g) if alpha == 1.0 else g * torch.sigmoid(alpha * g)
    return activated * (u + offset if offset else u)


def _swiglu_sample(batch: int, length: int) -> Mapping[str, Any]:
    return {"gate": (batch, length, 6), "up": (batch, length, 6), "limit": 1.5, "alpha": 1.7, "offset": 1.0}


SWIGLU_GPT_OSS = {"limit": 7.0, "alpha": 1.702, "offset": 1.0, "interleaved": True}


SWIGLU = Evidence(
    formula="gate * sigmoid(alpha * gate) * (up + offset)",
    cases=[
        Case("llama3_8b_mlp", {"gate": (2048, 14336), "up": (2048, 14336)}, "Llama 3 8B, 2048 tokens"),
        Case("llama2_7b_packed", {"gate": (2048, 22016)}, "Llama 2 7B, 2 * 11008, Megatron's packed halves"),
        Case("gpt_oss_experts", {"gate": (512, 5760), **SWIGLU_GPT_OSS}, "gpt-oss 20B, 2 * 2880, interleaved, clamped"),
        Case("clamped", {"gate": (16, 256), "up": (16, 256), "limit": 1.0}, "the form without an offset"),
        Case("clamped_packed", {"gate": (16, 512), "limit": 1.0}, "Megatron's clamped_swiglu"),
        Case("ragged", {"gate": (3, 1001), "up": (3, 1001)}, "no size is a power of two"),
        Case("ragged_packed", {"gate": (3, 5, 66), "interleaved": True}, "rows of 33 pairs"),
    ],
    tolerance={
        torch.float16: Tolerance(1e-6, 1e-3),  # one rounding to an 11-bit mantissa
        torch.bfloat16: Tolerance(1e-6, 1.6e-2),  # one rounding to an 8-bit mantissa
        torch.float32: Tolerance(1e-6, 2e-6),  # exp, a division and three products, each within 1e-7
        torch.float64: Tolerance(2e-15, 1e-12),
    },
    gradient_tolerance={
        # absolute: near gate = -1.28, where the slope is 0, the terms of size grad * up cancel
        torch.float16: Tolerance(1e-6, 1e-3),
        torch.bfloat16: Tolerance(1e-6, 1.6e-2),
        torch.float32: Tolerance(1e-6, 3e-6),
        torch.float64: Tolerance(2e-15, 1e-12),
    },
    error_bound=error_bound_of(swiglu.reference),
    gradient_error_bound=gradient_error_bound_of(swiglu.backward),
    min_bytes=_min_bytes,
    unfused=swiglu_unfused,
    sample=_swiglu_sample,
    large=[
        Case("two tensors", {"gate": (8192, 4096), "up": (8192, 4096)}),
        Case("packed", {"gate": (8192, 8192)}),
        Case("packed, gpt-oss", {"gate": (8192, 8192), **SWIGLU_GPT_OSS}),
    ],
    sweep=lambda rows, width: {"gate": (rows, width), "up": (rows, width)},
    rows=[
        Rows("rows", lambda count: {"gate": (count, 67), "up": (count, 67)}, dict.fromkeys(("gate", "up", "y"), 0)),
        Rows("rows, packed", lambda count: {"gate": (count, 134), **SWIGLU_GPT_OSS}, {"gate": 0, "y": 0}),
    ],
    peers="""
| peer | form | packed | in 16 bits |
|---|---|---|---|
| transformers, `LlamaMLP` | two tensors | | silu rounded, then the product |
| Megatron-LM, `bias_swiglu_impl` | packed | halves | silu rounded, then the product |
| Liger, `LigerSiLUMulFunction` | two tensors | | silu rounded; backward writes over gate and up |
| torch_npu, `npu_swiglu` | packed | halves | rounded once |
| torch_npu, `npu_clipped_swiglu` | packed | both | no backward |
| fusedops | both | both | rounded once |
""",
    sharded=("`gate` with `up`: any dim; packed: any dim except the last", "`up` as `gate`", "as `gate`"),
)


# --------------------------------------------------------------------------------------------------------------- geglu


def geglu_unfused(gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool) -> Tensor:
    """Compute the op as models do without fused ops."""
    g, u = split(gate, interleaved) if up is None else (gate, up)
    return torch.nn.functional.gelu(g, approximate=approximate) * u


def _geglu_sample(batch: int, length: int) -> Mapping[str, Any]:
    return {"gate": (batch, length, 6), "up": (batch, length, 6), "approximate": "tanh"}


GEGLU = Evidence(
    formula="gelu(gate) * up",
    cases=[
        Case("gemma_7b_mlp", {"gate": (2048, 24576), "up": (2048, 24576)}, "Gemma 7B, 2048 tokens"),
        Case("t5_xl_mlp", {"gate": (512, 5120), "up": (512, 5120), "approximate": "none"}, "the exact form"),
        Case("packed", {"gate": (2048, 20480)}, "packed halves of 10240"),
        Case("packed_exact", {"gate": (64, 512), "approximate": "none"}, "packed halves, the exact form"),
        Case("ragged", {"gate": (3, 1001), "up": (3, 1001)}, "no size is a power of two"),
        Case("ragged_interleaved", {"gate": (3, 5, 66), "interleaved": True}, "rows of 33 pairs"),
    ],
    tolerance={
        # absolute: 1 + erf cancels for a negative gate; the tests have up to 15 in up
        torch.float16: Tolerance(1e-6, 1e-3),  # one rounding to an 11-bit mantissa
        torch.bfloat16: Tolerance(1e-6, 1.6e-2),  # one rounding to an 8-bit mantissa
        torch.float32: Tolerance(1e-6, 2e-6),
        torch.float64: Tolerance(2e-15, 1e-12),
    },
    gradient_tolerance={
        torch.float16: Tolerance(1e-6, 1e-3),
        torch.bfloat16: Tolerance(1e-6, 1.6e-2),
        torch.float32: Tolerance(1e-6, 3e-6),
        torch.float64: Tolerance(2e-15, 1e-12),
    },
    error_bound=error_bound_of(geglu.reference),
    gradient_error_bound=gradient_error_bound_of(geglu.backward),
    min_bytes=_min_bytes,
    unfused=geglu_unfused,
    sample=_geglu_sample,
    large=[
        Case("two tensors", {"gate": (8192, 4096), "up": (8192, 4096)}),
        Case("packed, erf", {"gate": (8192, 8192), "approximate": "none"}),
    ],
    sweep=lambda rows, width: {"gate": (rows, width), "up": (rows, width)},
    rows=[
        Rows("rows", lambda count: {"gate": (count, 67), "up": (count, 67)}, dict.fromkeys(("gate", "up", "y"), 0)),
        Rows("rows, erf", lambda count: {"gate": (count, 134), "approximate": "none"}, {"gate": 0, "y": 0}),
    ],
    sharded=("`gate` with `up`: any dim; packed: any dim except the last", "`up` as `gate`", "as `gate`"),
)

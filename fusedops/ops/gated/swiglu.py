"""SwiGLU (Shazeer 2020, arXiv:2002.05202), the activation of the MLP of Llama and most later models. Replaces
Megatron's bias_swiglu_impl without a bias, Liger's LigerSiLUMulFunction, vLLM's silu_and_mul, torch_npu's npu_swiglu,
gpt-oss's clamped form, and the chain silu -> mul.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Case, Tolerance
from fusedops._dispatch.call import call
from fusedops.constraints import Finite
from fusedops.ops.gated.error_bounds import swiglu_error, swiglu_gradient_error
from fusedops.ops.gated.formulas import SHARDING, TENSORS, empty, gradients, min_bytes, promoted, split, wide_pair


def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    offset: float = 0.0,
    interleaved: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute ``gate * sigmoid(alpha * gate) * (up + offset)``.

    Args:
        gate: (..., H), float16, bfloat16, float32 or float64. Without ``up``: (..., 2H), gate and up packed in the last
            dim.
        up: the shape of ``gate``, any of the same dtypes, or None.
        limit: at least 0: before the rest, gate is clamped to at most ``limit``, and up to [-limit, limit]. None: no
            clamp. gpt-oss has limit 7, alpha 1.702, offset 1.
        alpha: a number, finite in float32.
        offset: a number, finite in float32.
        interleaved: gate is at the even positions of a packed tensor and up at the odd ones. False: gate is its first
            half. Has no effect where ``up`` is given.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        (..., H), contiguous, the dtype of ``gate * up`` by torch's promotion. Computed in float32 (float64 for
        float64), rounded once. A gate of -inf gives 0 where alpha is positive and up is finite. The gradient passes at
        the bounds of the clamp, as torch.clamp's does in torch 2.13.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: Megatron-LM, ``megatron/core/fusions/fused_bias_swiglu.py``; transformers, ``modeling_gpt_oss.py``.

    >>> import torch, fusedops
    >>> fusedops.swiglu(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([0.0000, 5.2848])
    """
    return call(OP, (gate, up, limit, alpha, offset, interleaved), backend)


def _clamped(g: Tensor, u: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """Clamp, with gradients that pass at the bounds. Those of torch.clamp do in torch 2.13, and are 0 in torch 2.15."""
    if limit is None:
        return g, u
    return g.masked_fill(g > limit, limit), u.masked_fill(u > limit, limit).masked_fill(u < -limit, -limit)


def reference(
    gate: Tensor, up: Tensor | None, limit: float | None, alpha: float, offset: float, interleaved: bool
) -> Tensor:
    """Compute the op in plain torch."""
    g, u = _clamped(*wide_pair(gate, up, interleaved), limit)
    s = torch.sigmoid(alpha * g)
    y = g.masked_fill(s == 0, 0.0) * s * (u + offset)  # -inf * 0 would be NaN
    return y.to(promoted(gate, up))


def backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    limit: float | None,
    alpha: float,
    offset: float,
    interleaved: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of gate and up from the inputs."""
    g_given, u_given = wide_pair(gate, up, interleaved)
    g, u = _clamped(g_given, u_given, limit)
    s = torch.sigmoid(alpha * g)
    g = g.masked_fill(s == 0, 0.0)
    wide_grad = grad.to(g.dtype)
    dgate = wide_grad * (u + offset) * s * (1 + alpha * (g * (1 - s)))
    dup = wide_grad * g * s
    if limit is not None:
        dgate, dup = dgate.where(g_given <= limit, 0.0), dup.where(u_given.abs() <= limit, 0.0)
    return gradients(dgate, dup, gate, up, interleaved, needs)


def unfused(
    gate: Tensor, up: Tensor | None, limit: float | None, alpha: float, offset: float, interleaved: bool
) -> Tensor:
    """Compute the op as models do without fused ops."""
    g, u = split(gate, interleaved) if up is None else (gate, up)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    activated = torch.nn.functional.silu(g) if alpha == 1.0 else g * torch.sigmoid(alpha * g)
    return activated * (u + offset if offset else u)


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    return {"gate": (batch, length, 6), "up": (batch, length, 6), "limit": 1.5, "alpha": 1.7, "offset": 1.0}


_GPT_OSS = {"limit": 7.0, "alpha": 1.702, "offset": 1.0, "interleaved": True}

OP = Op(
    swiglu,
    constraints=[*TENSORS, Finite("limit", at_least=0.0, optional=True), Finite("alpha"), Finite("offset")],
    reference=reference,
    backward=backward,
    differentiable=("gate", "up"),
    error=swiglu_error,
    gradient_error=swiglu_gradient_error,
    output_dtype=promoted,
    empty=empty,
    tolerance={
        torch.float16: Tolerance(1e-3, 1e-3),  # one rounding to an 11-bit mantissa
        torch.bfloat16: Tolerance(1e-2, 1.6e-2),  # one rounding to an 8-bit mantissa
        torch.float32: Tolerance(2e-6, 2e-6),  # exp, a division and three products, each within 1e-7
        torch.float64: Tolerance(1e-12, 1e-12),
    },
    gradient_tolerance={
        # absolute: near gate = -1.28, where the slope is 0, the terms of size grad * up cancel
        torch.float16: Tolerance(2e-3, 1e-3),
        torch.bfloat16: Tolerance(2e-2, 1.6e-2),
        torch.float32: Tolerance(2e-5, 3e-6),
        torch.float64: Tolerance(1e-11, 1e-12),
    },
    cases=[
        Case("llama3_8b_mlp", {"gate": (2048, 14336), "up": (2048, 14336)}, "Llama 3 8B, 2048 tokens"),
        Case("llama2_7b_packed", {"gate": (2048, 22016)}, "Llama 2 7B, 2 * 11008, Megatron's packed halves"),
        Case("gpt_oss_experts", {"gate": (512, 5760), **_GPT_OSS}, "gpt-oss 20B, 2 * 2880, interleaved, clamped"),
        Case("clamped", {"gate": (16, 256), "up": (16, 256), "limit": 1.0}, "the form without an offset"),
        Case("clamped_packed", {"gate": (16, 512), "limit": 1.0}, "Megatron's clamped_swiglu"),
        Case("ragged", {"gate": (3, 1001), "up": (3, 1001)}, "no size is a power of two"),
        Case("ragged_packed", {"gate": (3, 5, 66), "interleaved": True}, "rows of 33 pairs"),
    ],
    min_bytes=min_bytes,
    unfused=unfused,
    formula="gate * sigmoid(alpha * gate) * (up + offset)",
    sharding=SHARDING,
    sample=_sample,
    large=[
        Case("two tensors", {"gate": (8192, 4096), "up": (8192, 4096)}),
        Case("packed", {"gate": (8192, 8192)}),
        Case("packed, gpt-oss", {"gate": (8192, 8192), **_GPT_OSS}),
    ],
    sweep=lambda rows, width: {"gate": (rows, width), "up": (rows, width)},
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
)

"""GEGLU (Shazeer 2020, arXiv:2002.05202), the activation of the MLP of Gemma and T5 v1.1. Replaces Liger's
LigerGELUMulFunction, torch_npu's npu_geglu, and the chain gelu -> mul.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Case, Tolerance
from fusedops._dispatch.call import call
from fusedops.constraints import OneOf
from fusedops.ops.gated.error_bounds import geglu_error, geglu_gradient_error
from fusedops.ops.gated.formulas import SHARDING, TENSORS, empty, gradients, min_bytes, promoted, split, wide_pair

# below, GELU and its derivative are 0 in float64 too; above, GELU is the gate and its derivative 1
_SATURATION = 32.0


def geglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    approximate: Literal["tanh", "none"] = "tanh",
    interleaved: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute ``gelu(gate) * up``.

    Args:
        gate: (..., H), float16, bfloat16, float32 or float64. Without ``up``: (..., 2H), gate and up packed in the last
            dim, the gate first. diffusers packs up first: pass its halves as two tensors.
        up: the shape of ``gate``, any of the same dtypes, or None.
        approximate: "tanh", as Gemma has it, or "none", the exact form by erf.
        interleaved: gate is at the even positions of a packed tensor and up at the odd ones. False: gate is its first
            half. Has no effect where ``up`` is given.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        (..., H), contiguous, the dtype of ``gate * up`` by torch's promotion. Computed in float32 (float64 for
        float64), rounded once. A gate of -inf gives 0 where up is finite.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: transformers, ``modeling_gemma.py``; Liger, ``LigerGELUMulFunction``.

    >>> import torch, fusedops
    >>> fusedops.geglu(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([0.0000, 5.8638])
    """
    return call(OP, (gate, up, approximate, interleaved), backend)


def reference(gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool) -> Tensor:
    """Compute the op in plain torch."""
    g, u = wide_pair(gate, up, interleaved)
    g = g.clamp(min=-_SATURATION)  # -inf * 0 would be NaN
    if approximate == "tanh":
        activated = torch.nn.functional.gelu(g, approximate="tanh")
    else:
        # written out: torch's own kernel for AVX-512 returns NaN for inf (torch 2.13)
        activated = 0.5 * g * (1 + torch.erf(g / math.sqrt(2)))
    return (activated * u).to(promoted(gate, up))


def backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of gate and up from the inputs."""
    g, u = wide_pair(gate, up, interleaved)
    c = g.clamp(-_SATURATION, _SATURATION)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi)
        t = torch.tanh(inner * c * (1 + 0.044715 * c * c))
        half, rest = 0.5 * (1 + t), 0.5 * (1 - t * t) * inner * (1 + 3 * 0.044715 * c * c)
    else:
        half = 0.5 * (1 + torch.erf(c / math.sqrt(2)))
        rest = torch.exp(-0.5 * c * c) / math.sqrt(2 * math.pi)
    wide_grad = grad.to(g.dtype)
    dgate, dup = wide_grad * u * (half + c * rest), wide_grad * g.clamp(min=-_SATURATION) * half
    return gradients(dgate, dup, gate, up, interleaved, needs)


def unfused(gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool) -> Tensor:
    """Compute the op as models do without fused ops."""
    g, u = split(gate, interleaved) if up is None else (gate, up)
    return torch.nn.functional.gelu(g, approximate=approximate) * u


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    return {"gate": (batch, length, 6), "up": (batch, length, 6), "approximate": "tanh"}


OP = Op(
    geglu,
    constraints=[*TENSORS, OneOf("approximate", "tanh", "none")],
    reference=reference,
    backward=backward,
    differentiable=("gate", "up"),
    output_dtype=promoted,
    empty=empty,
    error=geglu_error,
    gradient_error=geglu_gradient_error,
    tolerance={
        # absolute: 1 + erf cancels for a negative gate; the tests have up to 15 in up
        torch.float16: Tolerance(1e-3, 1e-3),  # one rounding to an 11-bit mantissa
        torch.bfloat16: Tolerance(1e-2, 1.6e-2),  # one rounding to an 8-bit mantissa
        torch.float32: Tolerance(1e-5, 2e-6),
        torch.float64: Tolerance(1e-12, 1e-12),
    },
    gradient_tolerance={
        torch.float16: Tolerance(2e-3, 1e-3),
        torch.bfloat16: Tolerance(2e-2, 1.6e-2),
        torch.float32: Tolerance(3e-5, 3e-6),
        torch.float64: Tolerance(1e-11, 1e-12),
    },
    cases=[
        Case("gemma_7b_mlp", {"gate": (2048, 24576), "up": (2048, 24576)}, "Gemma 7B, 2048 tokens"),
        Case("t5_xl_mlp", {"gate": (512, 5120), "up": (512, 5120), "approximate": "none"}, "the exact form"),
        Case("packed", {"gate": (2048, 20480)}, "packed halves of 10240"),
        Case("packed_exact", {"gate": (64, 512), "approximate": "none"}, "packed halves, the exact form"),
        Case("ragged", {"gate": (3, 1001), "up": (3, 1001)}, "no size is a power of two"),
        Case("ragged_interleaved", {"gate": (3, 5, 66), "interleaved": True}, "rows of 33 pairs"),
    ],
    min_bytes=min_bytes,
    unfused=unfused,
    formula="gelu(gate) * up",
    sharding=SHARDING,
    sample=_sample,
    large=[
        Case("two tensors", {"gate": (8192, 4096), "up": (8192, 4096)}),
        Case("packed, erf", {"gate": (8192, 8192), "approximate": "none"}),
    ],
    sweep=lambda rows, width: {"gate": (rows, width), "up": (rows, width)},
    peers="""
| peer | form | packed | GELU |
|---|---|---|---|
| transformers, `GemmaMLP` | two tensors | | tanh |
| Liger, `LigerGELUMulFunction` | two tensors | | tanh; backward writes over gate and up |
| diffusers, `GEGLU` | packed | halves, up first | exact |
| torch_npu, `npu_geglu` | packed | halves, up first by default | both |
| fusedops | both | both, gate first | both |
""",
)

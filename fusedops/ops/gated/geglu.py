"""GEGLU (Shazeer 2020, arXiv:2002.05202), the activation of the MLP of Gemma and T5 v1.1. Replaces Liger's
LigerGELUMulFunction, torch_npu's npu_geglu, and the chain gelu -> mul.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._dispatch.call import call
from fusedops.constraints import OneOf
from fusedops.dtypes import promoted
from fusedops.ops.gated.arguments import TENSORS
from fusedops.ops.gated.formulas import empty, gradients, output_dtype, wide_pair

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


OP = Op(
    geglu,
    constraints=[*TENSORS, OneOf("approximate", "tanh", "none")],
    reference=reference,
    backward=backward,
    differentiable=("gate", "up"),
    output_dtype=output_dtype,
    empty=empty,
    sharding="fusedops.ops.gated.sharding:SHARDING",
    evidence="fusedops.ops.gated.evidence:GEGLU",
)

"""Bias + GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415), the activation of a transformer's MLP. Replaces Megatron's
GeLUFunction, Slapo's BiasGeLUFunction, and the chain add -> gelu.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._dispatch.call import call
from fusedops.constraints import Broadcasts, Floating, OneOf, SameDevice
from fusedops.dtypes import compute_dtype, promoted

Approximate = Literal["tanh", "none"]


def bias_gelu(
    x: Tensor, bias: Tensor | None = None, *, approximate: Approximate = "tanh", backend: str | None = None
) -> Tensor:
    """Compute GELU of ``x + bias``.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64.
        bias: broadcastable to ``x``, usually (H,), any of the same dtypes, or None.
        approximate: "tanh", as Megatron and GPT-2 train with, or "none", the exact form by erf. They differ by up to
            4.7e-4.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        (..., H), contiguous, the dtype of ``x + bias`` by torch's promotion. The sum and the function are computed in
        float32 (float64 for float64). The gradient of ``bias`` is summed in float32, in the same order on every run.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: Megatron-LM, ``megatron/core/fusions/fused_bias_gelu.py``; torch, ``torch.nn.functional.gelu``.

    >>> import torch, fusedops
    >>> fusedops.bias_gelu(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    tensor([0.0000, 1.9546])
    """
    return call(OP, (x, bias, approximate), backend)


def output_dtype(x: Any, bias: Any, *rest: Any) -> torch.dtype:
    """Return the dtype of ``x + bias``."""
    return promoted(x, bias)


def summed(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x + bias in float32, or float64 for float64."""
    wide = compute_dtype(promoted(x, bias))
    return x.to(wide) if bias is None else x.to(wide) + bias.to(wide)


def reference(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Compute the op in plain torch."""
    u = summed(x, bias)
    if approximate == "tanh":
        y = torch.nn.functional.gelu(u, approximate="tanh")
    else:
        # written out: torch's own kernel for AVX-512 returns NaN for inf (torch 2.13)
        y = 0.5 * u * (1 + torch.erf(u / math.sqrt(2)))
    return y.to(promoted(x, bias))


def backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and bias from the inputs."""
    u = summed(x, bias)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi)
        t = torch.tanh(inner * u * (1 + 0.044715 * u * u))
        slope = 0.5 * (1 + t) + 0.5 * u * (1 - t * t) * inner * (1 + 3 * 0.044715 * u * u)
    else:
        slope = 0.5 * (1 + torch.erf(u / math.sqrt(2))) + u * torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)
    du = grad.to(u.dtype) * slope
    dx = du.to(x.dtype) if needs[0] else None
    dbias = du.sum_to_size(bias.shape).to(bias.dtype, copy=True) if bias is not None and needs[1] else None
    return dx, dbias


OP = Op(
    bias_gelu,
    constraints=[
        Floating("x"),
        OneOf("approximate", "tanh", "none"),
        Floating("bias"),
        SameDevice("bias", "x"),
        Broadcasts("bias", "x"),
    ],
    reference=reference,
    backward=backward,
    differentiable=("x", "bias"),
    output_dtype=output_dtype,
    evidence="fusedops.ops.bias.evidence:BIAS_GELU",
)

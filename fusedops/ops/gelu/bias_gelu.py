"""Bias + GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415), the activation of a transformer's MLP. Replaces Megatron's
GeLUFunction, Slapo's BiasGeLUFunction, and the chain add -> gelu.
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
from fusedops.constraints import Broadcasts, Floating, OneOf, SameDevice

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


def promoted(x: Any, bias: Any, *rest: Any) -> torch.dtype:
    """Return the dtype of ``x + bias``."""
    return x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    wide = torch.promote_types(promoted(x, bias), torch.float32)
    return x.to(wide) if bias is None else x.to(wide) + bias.to(wide)


def reference(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Compute the op in plain torch."""
    u = _sum(x, bias)
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
    u = _sum(x, bias)
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


def error(absolute: float, x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Return ``absolute * abs(x + bias)``: 1 + tanh and 1 + erf cancel below 0, and are constant beyond 10."""
    u = _sum(x, bias)
    overflow = (2 * u).isinf() & x.isfinite() & (True if bias is None else bias.isfinite())
    return (absolute * u.abs().clamp(max=10.0)).masked_fill(overflow, math.inf)


def gradient_error(
    absolute: float, grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor, Tensor | None]:
    """Return ``absolute`` times a bound of the derivative, which falls off below 0; its sum for the bias."""
    u = _sum(x, bias)
    slope = 0.02 + torch.exp(-0.25 * u.clamp(max=0.0).square())  # 0.02: where 1 + tanh cancels
    # the derivative of tanh is 0 * inf where the square overflows, or 0 or 1
    du = (absolute * grad.to(u.dtype).abs() * slope).masked_fill(u.square().isinf(), math.inf)
    return du, None if bias is None else du.sum_to_size(bias.shape)


def unfused(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Compute the op as models do without fused ops."""
    return torch.nn.functional.gelu(x if bias is None else x + bias, approximate=approximate)


def min_bytes(x: Any, bias: Any, approximate: str) -> Mapping[Any, int]:
    """Read x, write y; read grad and x, write dx. The bias, and its gradient, are read and written once."""
    elements, size = math.prod(x.shape), promoted(x, bias).itemsize
    small = 0 if bias is None else math.prod(bias.shape) * bias.dtype.itemsize
    forward = elements * (x.dtype.itemsize + size) + small
    return {"forward": forward, "backward": elements * (size + 2 * x.dtype.itemsize) + 2 * small}


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    return {"x": (batch, length, 6), "bias": (6,), "approximate": "tanh"}


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
    output_dtype=promoted,
    tolerance={
        torch.float16: Tolerance(2e-6, 1e-3),  # one rounding to an 11-bit mantissa
        torch.bfloat16: Tolerance(2e-6, 1.6e-2),  # one rounding to an 8-bit mantissa
        torch.float32: Tolerance(2e-6, 1.3e-6),  # the sigmoid form of tanh is within 5e-7
        torch.float64: Tolerance(1e-12, 1e-12),
    },
    gradient_tolerance={
        # absolute: dbias is a sum over rows in float32, in any order
        torch.float16: Tolerance(1e-4, 2e-3),
        torch.bfloat16: Tolerance(1e-4, 1.6e-2),
        torch.float32: Tolerance(1e-4, 1e-5),
        torch.float64: Tolerance(1e-11, 1e-12),
    },
    error=error,
    gradient_error=gradient_error,
    cases=[
        Case("gpt3_6.7b_mlp", {"x": (2048, 16384), "bias": (16384,)}, "GPT-3 6.7B, 4 * 4096, one sequence"),
        Case("bert_large_mlp", {"x": (8, 512, 4096), "bias": (4096,), "approximate": "none"}, "BERT-large, erf"),
        Case("ragged", {"x": (3, 1000), "bias": (1000,)}, "no size is a power of two"),
        Case("no_bias", {"x": (4, 128, 3072)}, "GPT-2, the bias added by the linear layer"),
        Case("row_bias", {"x": (64, 96), "bias": (64, 1)}, "a bias for each row"),
        Case("full_bias", {"x": (16, 256), "bias": (16, 256)}, "a bias of x's own shape"),
    ],
    min_bytes=min_bytes,
    unfused=unfused,
    formula="gelu(x + bias)",
    sample=_sample,
    large=[
        Case("tanh", {"x": (8192, 4096), "bias": (4096,)}),
        Case("erf", {"x": (8192, 4096), "bias": (4096,), "approximate": "none"}),
    ],
    sweep=lambda rows, width: {"x": (rows, width), "bias": (width,)},
    peers="""
| peer | form | bias | in 16 bits |
|---|---|---|---|
| Megatron-LM, `bias_gelu_impl` | tanh | needed | each step rounded |
| Slapo, `BiasGeLUFunction` | tanh | needed | each step rounded |
| torch_npu, `npu_gelu` | tanh or exact | none: the sum is a pass of its own | |
| fusedops | tanh or exact | any shape that broadcasts, or None | computed in float32, rounded once |
""",
)

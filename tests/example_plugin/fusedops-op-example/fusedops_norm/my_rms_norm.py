"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467)."""

from typing import Any

import torch
from torch import Tensor

from fusedops import Case, Evidence, Op, Saved, Sharding, Tolerance, call
from fusedops.constraints import Broadcasts, Finite, Floating, Rank, SameDevice

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def my_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, *, backend: str | None = None) -> Tensor:
    """Compute ``x / sqrt(mean(x * x, -1) + eps) * weight`` in float32; x is (..., H), weight is (H,)."""
    return call(OP, (x, weight, eps), backend)


def wide(x: Tensor) -> Tensor:
    """Return x in the dtype of the arithmetic: float32, or float64 for float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rstd(x: Tensor, eps: float) -> Tensor:
    """Compute the saved value: 1 / sqrt(mean(x * x, -1) + eps), shape (..., 1)."""
    return (wide(x).square().mean(-1, keepdim=True) + eps).rsqrt()


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute the op in plain torch."""
    return (wide(x) * rstd(x, eps) * wide(weight)).to(x.dtype)


def backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, needs: tuple[bool, ...]) -> tuple[Any, Any]:
    """Compute the gradients of x and weight from the inputs and the saved value."""
    normed, g = wide(x) * rstd, wide(grad)
    scaled = g * wide(weight)
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rstd
    dweight = (g * normed).sum_to_size(weight.shape)
    return dx.to(x.dtype) if needs[0] else None, dweight.to(weight.dtype) if needs[1] else None


def unfused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute the op as models do without fused ops; the baseline of benchmarks."""
    return weight * (x * (x * x).mean(-1, keepdim=True).add(eps).rsqrt())


def min_bytes(x: Any, weight: Any, eps: float) -> dict[Any, int]:
    """Read x, write y; read grad and x, write dx."""
    return {"forward": 2 * x.nbytes, "backward": 3 * x.nbytes}


OP = Op(
    my_rms_norm,
    constraints=[
        Floating("x"),
        Rank("x", at_least=1),
        Floating("weight"),
        Rank("weight", 1),
        SameDevice("weight", "x"),
        Broadcasts("weight", "x"),
        Finite("eps", at_least=0.0),
    ],
    reference=reference,
    backward=backward,
    differentiable=("x", "weight"),
    saved=(Saved("rstd", rstd),),
    sharding=Sharding(whole=(-1,)),
    evidence=Evidence(
        tolerance={dtype: Tolerance(each, each) for dtype, each in zip(DTYPES, (1e-12, 1e-5, 2e-3, 2e-2))},
        gradient_tolerance={dtype: Tolerance(each, each) for dtype, each in zip(DTYPES, (1e-11, 1e-4, 4e-3, 4e-2))},
        cases=[
            Case("llama_7b", {"x": (2048, 4096), "weight": (4096,)}, "Llama 2 7B, one sequence"),
            Case("ragged", {"x": (3, 1001), "weight": (1001,), "eps": 1e-6}, "no size is a power of two"),
        ],
        min_bytes=min_bytes,
        unfused=unfused,
        formula="x / sqrt(mean(x * x) + eps) * weight",
    ),
)

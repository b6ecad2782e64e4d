"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), the norm of Llama-like models. Replaces the modules of Llama and
Gemma, torch's rms_norm, and Liger's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Case, Saved
from fusedops._dispatch.call import call
from fusedops.constraints import Finite
from fusedops.ops.norms import formulas
from fusedops.ops.norms.error_bounds import backward_error, forward_error


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, backend: str | None = None
) -> Tensor:
    """Compute ``x * rsqrt(mean(x**2, -1) + eps) * (offset + weight)``.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64.
        weight: (H,), any of the same dtypes, or None for no factor; ``offset`` is not used then.
        eps: added to the mean square; finite, at least 0.
        offset: added to the weight. 1.0 for models that keep ``weight - 1``, as Gemma does.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        (..., H), contiguous, the dtype of ``x``. Computed in float32 (float64 for float64) and rounded once. The
        gradient of ``weight`` is summed in float32, in the same order on every run.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: torch, ``torch.nn.functional.rms_norm``; transformers, ``LlamaRMSNorm`` and ``GemmaRMSNorm``.

    >>> import torch, fusedops
    >>> fusedops.rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), eps=0.0)
    tensor([0.8485, 2.2627])
    """
    return call(OP, (x, weight, eps, offset), backend)


def reference(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """Compute the op in plain torch."""
    y = formulas.normalized(x, formulas.rstd_of(x, eps, centered=False))
    scale = formulas.factor(weight, offset, y.dtype)
    return (y if scale is None else y * scale).to(x.dtype)


def rstd(x: Tensor, eps: float) -> Tensor:
    """Compute the saved value: rsqrt(mean(x**2, -1) + eps), (...)."""
    return formulas.rstd_of(x, eps, centered=False)


def backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, offset: float, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and weight."""
    normal, g = formulas.normalized(x, rstd), grad.to(rstd.dtype)
    dx = None
    if needs[0]:
        dx = formulas.row_gradient(g, normal, rstd, formulas.factor(weight, offset, rstd.dtype), centered=False).to(
            x.dtype
        )
    return dx, formulas.summed(g * normal, weight) if weight is not None and needs[1] else None


def error(
    absolute: float, x: Tensor, weight: Tensor | None, eps: float, offset: float, save: bool
) -> tuple[Tensor, ...]:
    """Return the changes of y and rstd."""
    return forward_error(absolute, x, weight, None, eps, offset, centered=False)


def gradient_error(
    absolute: float,
    grad: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the changes of the gradients of x and weight."""
    return backward_error(absolute, grad, x, None, rstd, weight, None, offset)[:2]


def unfused(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """Compute the op as models do without fused ops."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) if weight is None else (y * (offset + weight.float())).to(x.dtype)


def min_bytes(x: Any, weight: Any, eps: float, offset: float) -> Mapping[Any, int]:
    """Read x, write y; read grad and x, write dx. The weight, and its gradient, are read and written once."""
    return {
        "forward": formulas.row_bytes(x, (x.dtype,) * 2, (weight,)),
        "backward": formulas.row_bytes(x, (x.dtype,) * 3, (weight,) * 2),
    }


OP = Op(
    rms_norm,
    constraints=[*formulas.X, Finite("offset"), *formulas.WEIGHT],
    reference=reference,
    backward=backward,
    differentiable=("x", "weight"),
    saved=(Saved("rstd", rstd),),
    tolerance=formulas.TOLERANCE,
    gradient_tolerance=formulas.GRADIENT_TOLERANCE,
    error=error,
    gradient_error=gradient_error,
    cases=[
        Case("llama_3_8b", {"x": (2048, 4096), "weight": (4096,), "eps": 1e-5}, "Llama 3 8B, one sequence"),
        Case("gemma_2b", {"x": (2, 512, 2048), "weight": (2048,), "offset": 1.0}, "Gemma 2B, weight stored minus 1"),
        Case("qwen_3_head", {"x": (4, 16, 64, 128), "weight": (128,)}, "Qwen 3, the norm of each query head"),
        Case("ragged", {"x": (3, 1001), "weight": (1001,), "eps": 1e-3}, "no size is a power of two"),
        Case("no_weight", {"x": (4, 96)}),
    ],
    min_bytes=min_bytes,
    unfused=unfused,
    formula="x * rsqrt(mean(x**2) + eps) * (offset + weight)",
    sharding=formulas.ROWS,
    sample=lambda batch, length: {"x": (batch, length, 6), "weight": (6,), "eps": 1e-5},
    large=[Case("training", {"x": (8192, 4096), "weight": (4096,)})],
    sweep=lambda rows, width: {"x": (rows, width), "weight": (width,)},
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
)

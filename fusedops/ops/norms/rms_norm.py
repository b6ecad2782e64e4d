"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), the norm of Llama-like models. Replaces the modules of Llama and
Gemma, torch's rms_norm, and Liger's.
"""

from __future__ import annotations

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Saved
from fusedops._dispatch.call import call
from fusedops.constraints import Finite
from fusedops.ops.norms import arguments, formulas


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
    return formulas.norm(x, None, weight, None, eps, offset, centered=False)[0]


def rstd(x: Tensor, eps: float) -> Tensor:
    """Compute the saved value: rsqrt(mean(x**2, -1) + eps), (...)."""
    return formulas.rstd_of(x, eps, centered=False)


def backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, offset: float, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and weight."""
    dx, dweight, _ = formulas.gradients(grad, x, None, rstd, weight, None, offset, (*needs, False))
    return None if dx is None else dx.to(x.dtype), dweight


OP = Op(
    rms_norm,
    constraints=[*arguments.X, Finite("offset"), *arguments.WEIGHT],
    reference=reference,
    backward=backward,
    differentiable=("x", "weight"),
    saved=(Saved("rstd", rstd),),
    sharding="fusedops.ops.norms.sharding:SHARDING",
    evidence="fusedops.ops.norms.evidence:RMS_NORM",
)

"""Residual add + RMSNorm, between the halves of a Llama-like layer. Replaces the chain add -> rms_norm."""

from __future__ import annotations

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Saved
from fusedops._dispatch.call import call
from fusedops.ops.norms import arguments, formulas, rms_norm
from fusedops.ops.norms.arguments import AddRmsNormArgs, AddRmsNormGradArgs


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``s = x + residual`` and ``y = rms_norm(s, weight, eps, offset=offset)``.

    The norm is computed from s after its rounding to the dtype in which it is returned.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64.
        residual: the shape of ``x``, any of the same dtypes.
        weight: (H,), any of the same dtypes, or None for no factor; ``offset`` is not used then.
        eps: added to the mean square; finite, at least 0.
        offset: added to the weight. 1.0 for models that keep ``weight - 1``, as Gemma does.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        y, in the dtype of ``x``, and s, in the dtype of ``x + residual`` by torch's promotion: (..., H), contiguous.
        Each is computed in float32 (float64 for float64) and rounded once. The gradient of ``weight`` is summed in
        float32, in the same order on every run.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: Liger, ``LigerFusedAddRMSNormFunction``; vLLM, ``RMSNorm.forward(x, residual)``.

    >>> import torch, fusedops
    >>> fusedops.add_rms_norm(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 1.0]), eps=0.0)
    (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    return call(OP, (x, residual, weight, eps, offset), backend)


def reference(a: AddRmsNormArgs) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch."""
    return formulas.norm(a.x, a.residual, a.weight, None, a.eps, a.offset, centered=False)


def rstd(s: Tensor, eps: float) -> Tensor:
    """Compute the saved value: rsqrt(mean(s**2, -1) + eps), (...)."""
    return formulas.rstd_of(s, eps, centered=False)


def backward(a: AddRmsNormGradArgs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, residual and weight."""
    dx, dresidual, dweight, _ = formulas.residual_gradients(
        a.grad_y, a.grad_s, a.s, None, a.rstd, a.weight, None, a.offset, a.residual_dtype, (*a.needs, False)
    )
    return dx, dresidual, dweight


def empty(a: AddRmsNormArgs) -> tuple[Tensor, Tensor]:
    """Return empty outputs."""
    return formulas.empty_pair(a.x, a.residual)


OP = Op(
    add_rms_norm,
    constraints=[*rms_norm.OP.constraints, *arguments.RESIDUAL],
    reference=reference,
    backward=backward,
    differentiable=("x", "residual", "weight"),
    outputs=("y", "s"),
    empty=empty,
    addend="residual",
    saved=(Saved("rstd", rstd),),
    sharding="fusedops.ops.norms.sharding:SHARDING",
    evidence="fusedops.ops.norms.evidence:ADD_RMS_NORM",
)

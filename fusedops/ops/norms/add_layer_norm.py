"""Residual add + LayerNorm, between the halves of a BERT-like or GPT-2-like layer. Replaces add -> layer_norm."""

from __future__ import annotations

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Saved
from fusedops._dispatch.call import call
from fusedops.ops.norms import arguments, formulas, layer_norm
from fusedops.ops.norms.arguments import AddLayerNormArgs, AddLayerNormGradArgs


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``s = x + residual`` and ``y = layer_norm(s, weight, bias, eps)``.

    The norm is computed from s after its rounding to the dtype in which it is returned.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64.
        residual: the shape of ``x``, any of the same dtypes.
        weight: (H,), any of the same dtypes, or None for no factor.
        bias: (H,), any of the same dtypes, or None.
        eps: added to the variance; finite, at least 0.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        y, in the dtype of ``x``, and s, in the dtype of ``x + residual`` by torch's promotion: (..., H), contiguous.
        Each is computed in float32 (float64 for float64) and rounded once. The gradients of ``weight`` and ``bias`` are
        summed in float32, in the same order on every run.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: flash-attention, ``layer_norm_fn(residual=, prenorm=True)``; torch_npu, ``npu_add_layer_norm``.

    >>> import torch, fusedops
    >>> fusedops.add_layer_norm(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]), eps=0.0)
    (tensor([-1.,  1.]), tensor([1., 3.]))
    """
    return call(OP, (x, residual, weight, bias, eps), backend)


def reference(a: AddLayerNormArgs) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch."""
    return formulas.norm(*a, 0.0, centered=True)


def mean(s: Tensor) -> Tensor:
    """Compute the saved mean of each row: (...)."""
    return formulas.mean_of(s)


def rstd(s: Tensor, eps: float) -> Tensor:
    """Compute the saved rsqrt(var(s, -1) + eps): (...)."""
    return formulas.rstd_of(s, eps, centered=True)


def backward(a: AddLayerNormGradArgs) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, residual, weight and bias."""
    return formulas.residual_gradients(
        a.grad_y, a.grad_s, a.s, a.mean, a.rstd, a.weight, a.bias, 0.0, a.residual_dtype, a.needs
    )


def empty(a: AddLayerNormArgs) -> tuple[Tensor, Tensor]:
    """Return empty outputs."""
    return formulas.empty_pair(a.x, a.residual)


OP = Op(
    add_layer_norm,
    constraints=[*layer_norm.OP.constraints, *arguments.RESIDUAL],
    reference=reference,
    backward=backward,
    differentiable=("x", "residual", "weight", "bias"),
    outputs=("y", "s"),
    empty=empty,
    addend="residual",
    saved=(Saved("mean", mean), Saved("rstd", rstd)),
    sharding="fusedops.ops.norms.sharding:SHARDING",
    evidence="fusedops.ops.norms.evidence:ADD_LAYER_NORM",
)

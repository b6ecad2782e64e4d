"""A norm with a scale and a shift that the model computes for each sample or token (adaptive LayerNorm: Peebles & Xie
2023, arXiv:2212.09748). Replaces the chain norm -> * (1 + scale) -> + shift.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Saved
from fusedops._dispatch.call import call
from fusedops.ops.modulated import arguments, formulas
from fusedops.ops.modulated.arguments import LAYER, ModulatedNormArgs, ModulatedNormGradArgs, per_sample
from fusedops.ops.norms.formulas import rstd_of


def modulated_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    kind: str = "layer",
    offset: float = 1.0,
    backend: str | None = None,
) -> Tensor:
    """Compute ``(norm(x) * weight + bias) * (offset + scale) + shift``.

    Args:
        x: (B, S, H), float16, bfloat16, float32 or float64.
        scale: (H,), (B, H), (B, 1, H) or (B, S, H), where 1 may stand for B and S, of any strides: a view of a longer
            row is not copied. Any of the same dtypes, such as float32 beside bfloat16.
        shift: the same, or None.
        weight: (H,), any of the same dtypes, or None for no factor.
        bias: (H,), any of the same dtypes, or None.
        eps: added to the variance, or to the mean square; finite, at least 0.
        kind: the norm of each row: "layer", ``(x - mean(x)) * rsqrt(var(x) + eps)``, or "rms",
            ``x * rsqrt(mean(x**2) + eps)``.
        offset: added to the scale.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        (B, S, H), contiguous, the dtype of ``x``. Computed in float32 (float64 for float64) and rounded once. The
        gradients of all but x are summed in float32, over what they repeat for, in the same order on every run.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: diffusers, ``AdaLayerNormZero`` and ``LuminaRMSNormZero``.

    >>> import torch, fusedops
    >>> x, scale, shift = torch.tensor([[[1.0, 3.0]]]), torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 5.0]])
    >>> fusedops.modulated_norm(x, scale, shift, eps=0.0)
    tensor([[[-2.,  6.]]])
    """
    return call(OP, (x, per_sample(scale), per_sample(shift), weight, bias, eps, kind, offset), backend)


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with ``scale`` and ``shift`` of one row for each sample as (B, 1, H)."""
    return arguments.prepared(args, (1, 2))


def reference(a: ModulatedNormArgs) -> Tensor:
    """Compute the op in plain torch."""
    return formulas.modulated_norm(a)


def mean(x: Tensor, kind: str) -> Tensor:
    """Compute the saved mean of each row, 0 for RMSNorm: (B, S)."""
    return formulas.mean_of(x, kind)


def rstd(x: Tensor, eps: float, kind: str) -> Tensor:
    """Compute the saved rsqrt(var(x, -1) + eps), or of the mean square: (B, S)."""
    return rstd_of(x, eps, kind == LAYER)


def backward(a: ModulatedNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, scale, shift, weight and bias."""
    dx, *others = formulas.modulated_norm_gradients(a)
    return None if dx is None else dx.to(a.x.dtype), *others


OP = Op(
    modulated_norm,
    constraints=[*arguments.rows_of("x"), *arguments.modulation("x")],
    reference=reference,
    backward=backward,
    differentiable=("x", "scale", "shift", "weight", "bias"),
    saved=(Saved("mean", mean), Saved("rstd", rstd)),
    prepare_args=prepare_args,
    sharding="fusedops.ops.modulated.sharding:SHARDING",
    evidence="fusedops.ops.modulated.evidence:MODULATED_NORM",
)

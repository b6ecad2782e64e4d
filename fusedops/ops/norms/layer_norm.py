"""LayerNorm (Ba et al. 2016, arXiv:1607.06450). Replaces torch's layer_norm and apex's FusedLayerNorm."""

from __future__ import annotations

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Saved
from fusedops._dispatch.call import call
from fusedops.ops.norms import arguments, formulas


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> Tensor:
    """Compute ``(x - mean(x, -1)) * rsqrt(var(x, -1) + eps) * weight + bias``, with the biased variance.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64.
        weight: (H,), any of the same dtypes, or None for no factor.
        bias: (H,), any of the same dtypes, or None.
        eps: added to the variance; finite, at least 0.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        (..., H), contiguous, the dtype of ``x``. Computed in float32 (float64 for float64) and rounded once. The
        gradients of ``weight`` and ``bias`` are summed in float32, in the same order on every run. A gradient may be
        NaN where a row times its rstd, or a sum of its products with the gradient, exceeds the largest number.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: torch, ``torch.nn.functional.layer_norm``.

    >>> import torch, fusedops
    >>> fusedops.layer_norm(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]), torch.ones(2), eps=0.0)
    tensor([0., 3.])
    """
    return call(OP, (x, weight, bias, eps), backend)


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute the op in plain torch."""
    return formulas.norm(x, None, weight, bias, eps, 0.0, centered=True)[0]


def mean(x: Tensor) -> Tensor:
    """Compute the saved mean of each row: (...)."""
    return formulas.mean_of(x)


def rstd(x: Tensor, eps: float) -> Tensor:
    """Compute the saved rsqrt(var(x, -1) + eps): (...)."""
    return formulas.rstd_of(x, eps, centered=True)


def backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight and bias."""
    dx, dweight, dbias = formulas.gradients(grad, x, mean, rstd, weight, bias, 0.0, needs)
    return None if dx is None else dx.to(x.dtype), dweight, dbias


OP = Op(
    layer_norm,
    constraints=[*arguments.X, *arguments.WEIGHT, *arguments.BIAS],
    reference=reference,
    backward=backward,
    differentiable=("x", "weight", "bias"),
    saved=(Saved("mean", mean), Saved("rstd", rstd)),
    sharding="fusedops.ops.norms.sharding:SHARDING",
    evidence="fusedops.ops.norms.evidence:LAYER_NORM",
)

"""GroupNorm (Wu & He 2018, arXiv:1803.08494) and the SiLU after it. Replaces the chain group_norm -> silu."""

from __future__ import annotations

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Output, Saved
from fusedops._dispatch.call import call
from fusedops.ops.group_norm import arguments, formulas
from fusedops.ops.group_norm.arguments import NONE, GroupNormArgs, GroupNormGradArgs
from fusedops.ops.norms.formulas import mean_of, rstd_of


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute ``act((x - mean) * rsqrt(var + eps) * weight + bias)``, mean and variance of each group of channels.

    Args:
        x: (B, C, ...), 3 to 5 dims, float16, bfloat16, float32 or float64. Kernels read contiguous and channels-last
            memory as it is.
        groups: equal parts of the channels, each with a mean and a biased variance in each sample; a divisor of C.
        weight: (C,), any of the same dtypes, or None for no factor.
        bias: (C,), any of the same dtypes, or None.
        eps: added to the variance; finite, at least 0.
        activation: act: None, or "silu".
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        The shape and dtype of ``x``, its dims in memory in any order, without gaps: that of ``x`` where x has none.
        Computed in float32 (float64 for float64) and rounded once. silu of -inf is 0. The gradients of ``weight`` and
        ``bias`` are summed in float32, in the same order on every run.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: torch, ``torch.group_norm``; diffusers, ``ResnetBlock2D``.

    >>> import torch, fusedops
    >>> fusedops.group_norm(torch.tensor([[[1.0, 3.0], [4.0, 0.0]]]), 2, torch.tensor([1.0, 2.0]), eps=0.0)
    tensor([[[-1.,  1.],
             [ 2., -2.]]])
    """
    return call(OP, (x, groups, weight, bias, eps, NONE if activation is None else activation), backend)


def reference(a: GroupNormArgs) -> Tensor:
    """Compute the op in plain torch."""
    return formulas.group_norm(a)


def mean(x: Tensor, groups: int) -> Tensor:
    """Compute the saved mean of each group: (B, groups)."""
    return mean_of(formulas.rows_of(x, groups))


def rstd(x: Tensor, groups: int, eps: float) -> Tensor:
    """Compute the saved rsqrt(var + eps) of each group: (B, groups)."""
    return rstd_of(formulas.rows_of(x, groups), eps, centered=True)


def backward(a: GroupNormGradArgs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight and bias."""
    return formulas.group_norm_gradients(a)


OP = Op(
    group_norm,
    constraints=arguments.CONSTRAINTS,
    reference=reference,
    backward=backward,
    differentiable=("x", "weight", "bias"),
    outputs=(Output("y", permuted=True),),
    empty=formulas.empty,
    saved=(Saved("mean", mean), Saved("rstd", rstd)),
    prepare_args=arguments.prepare_args,
    sharding="fusedops.ops.group_norm.sharding:SHARDING",
    evidence="fusedops.ops.group_norm.evidence:GROUP_NORM",
)

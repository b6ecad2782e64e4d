"""The errors of torch's LayerNorm beside those that the op allows: see ``extra_error`` of ``fusedops.kernel``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.ops.norms.arguments import AddLayerNormGradArgs


def layer_norm_overflows(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *_: object
) -> tuple[Tensor, ...]:
    """Return inf for each row in which torch's sum of grad * weight * x, times rstd ** 3 * x, may overflow; else 0."""
    total = (grad.double().abs() * (1.0 if weight is None else weight.double().abs())).sum(-1, keepdim=True)
    reach = 1 + (x.double().abs() + mean.double().abs()[..., None]).sum(-1, keepdim=True)
    largest = total * reach.square() * (1 + rstd.double().abs()[..., None] ** 3)
    return (torch.zeros_like(largest).masked_fill(~(largest < torch.finfo(rstd.dtype).max), torch.inf),)


def add_layer_norm_overflows(a: AddLayerNormGradArgs) -> tuple[Tensor, ...]:
    """Return the same of x and of the residual."""
    return layer_norm_overflows(a.grad_y, a.s, a.mean, a.rstd, a.weight) * 2

"""The norms of zentorch, with their corrections.

- The functions take rows, and read past the end of a vector or normalize over other dims: any rank is viewed as 2-D.
- They ignore strides: rows and weights are contiguous here.
- A tensor without elements is not passed to them.
- eps of 0, and float16 on a processor without AVX512-FP16, leave the result unwritten, with a line on stderr alone:
  both are refused.
- They have no mean square to return. For a gradient, another backend's, it is computed in plain torch.

Source: zentorch 2.13.0.2, ``zentorch_rms_norm``, ``gdn_rms_norm_gated``; the limits were found by running them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import Deviation
from fusedops.constraints import Constraint, DType, Finite
from fusedops_zentorch._library import DTYPES, function

LIMITS: tuple[Constraint, ...] = (
    DType("x", *DTYPES),
    DType("weight", torch.float32, torch.bfloat16, torch.float16),
    Finite("eps", 1e-30),
)
NO_BACKWARD = Deviation("no-backward", "zentorch has no gradients: another backend computes them")


def normalized(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """Return ``x * rsqrt(mean(x**2, -1) + eps) * (offset + weight)``, (..., H), the dtype of x."""
    if not x.numel():
        return x.new_empty(x.shape)
    return function("zentorch_rms_norm")(rows_of(x), factor_of(x, weight, offset), eps).view(x.shape)


def rows_of(x: Tensor) -> Tensor:
    """Return the rows of x, contiguous: (N, H)."""
    return x.reshape(-1, x.shape[-1]).contiguous().resolve_neg()


def factor_of(x: Tensor, weight: Tensor | None, offset: float) -> Tensor:
    """Return the factor of each column, (H,): float32 or bfloat16, as the functions take it beside either."""
    if weight is None:
        return torch.ones(x.shape[-1], dtype=torch.float32, device=x.device)
    if offset:
        return weight.float() + offset
    return (weight.float() if weight.dtype is torch.float16 else weight).contiguous().resolve_neg()

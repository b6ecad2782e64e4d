"""add_rms_norm on Triton: the kernels with their constraints. ``_norm.py`` and ``_norm_backward.py`` launch."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops_triton._constraints import supported


@kernel(
    ops.add_rms_norm,
    *supported("x", "residual"),
    source="fusedops_triton/norms/_norm.py",
    rows_independent=True,
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, save: bool
) -> tuple[Tensor | None, ...]:
    """Compute the op for any rank, row length, strides and dtypes."""
    from fusedops_triton.norms._norm import norm_forward  # imports triton, so not at module level

    y, s, _, rstd = norm_forward(x, residual, weight, None, eps, offset, False, save)
    return y, s, rstd


@kernel(
    ops.add_rms_norm,
    *supported("s"),
    direction="backward",
    source="fusedops_triton/norms/_norm_backward.py",
    rows_independent=True,
)
def add_rms_norm_backward(
    grad_y: Tensor,
    grad_s: Tensor,
    s: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float,
    residual_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, residual and weight in one pass, up to the row length that fits."""
    from fusedops_triton.norms._norm_backward import norm_backward

    dtypes = (grad_y.dtype if needs[0] else None, residual_dtype if needs[1] else None)
    return norm_backward(grad_y, grad_s, s, None, rstd, weight, offset, dtypes, (weight if needs[2] else None, None))[
        :3
    ]

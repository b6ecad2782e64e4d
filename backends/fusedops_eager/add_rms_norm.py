"""add_rms_norm in plain torch, without constraints. The computation is in ``_norms.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops_eager._norms import rms_backward, rms_forward
from fusedops_eager._row_order import SUMS


@kernel(
    ops.add_rms_norm,
    source="torch.rms_norm, fusedops_eager/_norms.py",
    rows_independent=SUMS,
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, save: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the op on any device, for any rank and dtypes."""
    y, s, rstd = rms_forward(x, residual, weight, eps, offset)
    return y, s, rstd if save else None


@kernel(
    ops.add_rms_norm,
    direction="backward",
    source="fusedops_eager/_norms.py",
    rows_independent=SUMS,
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
    """Compute the gradients of x, residual and weight."""
    dtypes = (grad_y.dtype if needs[0] else None, residual_dtype if needs[1] else None)
    return rms_backward(grad_y, grad_s, s, rstd, weight, offset, dtypes, needs[2])

"""add_layer_norm in plain torch, without constraints. The computation is in ``_norms.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops_eager._norms import layer_backward, layer_forward
from fusedops_eager._row_order import on_cpu


@kernel(
    ops.add_layer_norm,
    source="torch.native_layer_norm",
    rows_independent=on_cpu(),
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, save: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute the op on any device, for any rank and dtypes."""
    y, s, mean, rstd = layer_forward(x, residual, weight, bias, eps)
    return y, s, mean if save else None, rstd if save else None


@kernel(
    ops.add_layer_norm,
    direction="backward",
    source="torch.native_layer_norm_backward",
    rows_independent=on_cpu(),
)
def add_layer_norm_backward(
    grad_y: Tensor,
    grad_s: Tensor,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, residual, weight and bias."""
    dtypes = (grad_y.dtype if needs[0] else None, residual_dtype if needs[1] else None)
    return layer_backward(grad_y, grad_s, s, mean, rstd, weight, bias, dtypes, (needs[2], needs[3]))

"""add_layer_norm on Triton: the kernels with their constraints. ``_norm.py`` and ``_norm_backward.py`` launch."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops_triton._constraints import supported


@kernel(
    ops.add_layer_norm,
    *supported("x", "residual"),
    source="fusedops_triton/norms/_norm.py",
    rows_independent=True,
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, save: bool
) -> tuple[Tensor | None, ...]:
    """Compute the op for any rank, row length, strides and dtypes."""
    from fusedops_triton.norms._norm import norm_forward  # imports triton, so not at module level

    return norm_forward(x, residual, weight, bias, eps, 0.0, True, save)


@kernel(
    ops.add_layer_norm,
    *supported("s"),
    direction="backward",
    source="fusedops_triton/norms/_norm_backward.py",
    rows_independent=True,
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
    """Compute the gradients of x, residual, weight and bias in one pass, up to the row length that fits."""
    from fusedops_triton.norms._norm_backward import norm_backward

    dtypes = (grad_y.dtype if needs[0] else None, residual_dtype if needs[1] else None)
    vectors = (weight if needs[2] else None, bias if needs[3] else None)
    return norm_backward(grad_y, grad_s, s, mean, rstd, weight, 0.0, dtypes, vectors)

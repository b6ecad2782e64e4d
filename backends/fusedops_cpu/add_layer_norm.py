"""add_layer_norm in the compiled library: its constraints; the launchers are in ``_norm.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import ops
from fusedops_cpu._calls import library_kernel
from fusedops_cpu._constraints import any_dtype, one_dtype
from fusedops_cpu._norm import Results, add_norm_backward, norm_forward
from fusedops_cpu._struct_call import LibraryCall


@library_kernel(
    ops.add_layer_norm,
    *one_dtype("x", "residual"),
    *any_dtype("weight", "bias"),
    source="fusedops_cpu/src/elementwise/norm.cpp",
    rows_independent=True,
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, save: bool
) -> LibraryCall:
    """Compute the op; x and residual of one dtype, weight and bias of any dtypes of the library."""
    return norm_forward(x, residual, weight, bias, eps, 0.0, True, save)


@library_kernel(
    ops.add_layer_norm,
    *any_dtype("s", "weight", "bias"),
    direction="backward",
    source="fusedops_cpu/src/elementwise/norm.cpp",
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
) -> LibraryCall | Results:
    """Compute the gradients of x, residual, weight and bias; sums over rows do not depend on the threads."""
    return add_norm_backward(grad_y, grad_s, s, mean, rstd, weight, bias, 0.0, residual_dtype, needs)

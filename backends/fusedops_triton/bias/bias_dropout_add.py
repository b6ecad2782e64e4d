"""bias_dropout_add on Triton: the kernels with their constraints. The launchers are in ``_bias_dropout.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops_triton._constraints import PLACE, supported


@kernel(
    ops.bias_dropout_add,
    *supported("x", "bias", "residual"),
    source="fusedops_triton/bias/_bias_dropout.py",
    rows_independent=PLACE,
)
def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    training: bool,
    seed: Tensor | None,
) -> Tensor:
    """Compute the op for any shape, strides, bias shape and mix of dtypes."""
    from fusedops_triton.bias._bias_dropout import dropout_forward  # imports triton, so not at module level

    return dropout_forward(x, bias, residual, p, training, seed)


@kernel(
    ops.bias_dropout_add,
    *supported("grad"),
    direction="backward",
    source="fusedops_triton/bias/_bias_dropout.py",
    rows_independent=PLACE,
)
def bias_dropout_add_backward(
    grad: Tensor,
    seed: Tensor | None,
    bias: Tensor | None,
    p: float,
    training: bool,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and of the bias, as in bias_dropout. The gradient of the residual is ``grad``."""
    from fusedops_triton.bias._bias_dropout import dropout_backward

    return dropout_backward(grad, seed, bias, p, training, x_dtype, needs)

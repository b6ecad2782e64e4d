"""bias_dropout_add in plain torch, without constraints. The computation is in ``_dropout.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops_eager._row_order import PLACE
from fusedops_eager.bias._dropout import dropout_backward, dropout_forward


@kernel(
    ops.bias_dropout_add,
    source="fusedops_eager/bias/_dropout.py",
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
    """Compute the op on any device, for any rank and bias shape."""
    return dropout_forward(x, bias, residual, p, training, seed)


@kernel(
    ops.bias_dropout_add,
    direction="backward",
    source="fusedops_eager/bias/_dropout.py",
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
    """Compute the gradients of x and of the bias. The gradient of the residual is ``grad`` itself."""
    return dropout_backward(grad, seed, bias, p, training, x_dtype, needs)

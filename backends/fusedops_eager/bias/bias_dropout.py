"""bias_dropout in plain torch, without constraints. The computation is in ``_dropout.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops_eager._row_order import PLACE
from fusedops_eager.bias._dropout import dropout_backward, dropout_forward


@kernel(
    ops.bias_dropout,
    source="fusedops_eager/bias/_dropout.py",
    rows_independent=PLACE,
)
def bias_dropout(x: Tensor, bias: Tensor | None, p: float, training: bool, seed: Tensor | None) -> Tensor:
    """Compute the op on any device, for any rank and bias shape."""
    return dropout_forward(x, bias, None, p, training, seed)


@kernel(
    ops.bias_dropout,
    direction="backward",
    source="fusedops_eager/bias/_dropout.py",
    rows_independent=PLACE,
)
def bias_dropout_backward(
    grad: Tensor,
    seed: Tensor | None,
    bias: Tensor | None,
    p: float,
    training: bool,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and of the bias, with the mask that follows from the seed."""
    return dropout_backward(grad, seed, bias, p, training, x_dtype, needs)

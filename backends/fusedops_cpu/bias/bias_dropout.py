"""bias_dropout in the compiled library: its constraints; the launchers are in ``_dropout.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import ops
from fusedops.constraints import Rank
from fusedops_cpu._constraints import PLACE, one_dtype, row_bias
from fusedops_cpu.bias._dropout import dropout_backward, dropout_forward
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.struct_call import LibraryCall


@library_kernel(
    ops.bias_dropout,
    *one_dtype("x"),
    *row_bias("x"),
    source="fusedops_cpu/src/elementwise/dropout.cpp",
    rows_independent=PLACE,
)
def bias_dropout(x: Tensor, bias: Tensor | None, p: float, training: bool, seed: Tensor | None) -> LibraryCall | Tensor:
    """Compute dropout(x + bias); x of any rank and strides."""
    return dropout_forward(x, bias, None, p, training, seed)


@library_kernel(
    ops.bias_dropout,
    *one_dtype("grad"),
    Rank("bias", 0, 1),
    direction="backward",
    source="fusedops_cpu/src/elementwise/dropout.cpp",
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
) -> LibraryCall | tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and bias."""
    return dropout_backward(grad, seed, bias, p, training, x_dtype, needs)

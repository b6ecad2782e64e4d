"""bias_dropout_add in the compiled library: its constraints; the launchers are in ``_dropout.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops.constraints import Rank
from fusedops_cpu._constraints import PLACE, one_dtype, row_bias
from fusedops_cpu.bias._dropout import dropout_backward, dropout_forward
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.library import DTYPE_CODES
from fusedops_cpu.launch.replay import LibraryReplay, record
from fusedops_cpu.launch.struct_call import LibraryCall


@library_kernel(
    ops.bias_dropout_add,
    *one_dtype("x", "residual"),
    *row_bias("x"),
    source="fusedops_cpu/src/elementwise/dropout.cpp",
    rows_independent=PLACE,
)
def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    training: bool,
    seed: Tensor | None,
) -> LibraryCall | Tensor:
    """Compute residual + dropout(x + bias); x and residual of one dtype, any rank and strides."""
    return dropout_forward(x, bias, residual, p, training, seed)


def recorded_add(x: Tensor, y: Tensor | float, *, alpha: float = 1) -> tuple[Any, LibraryReplay | None] | None:
    """Add two tensors as torch does, in a recorded run; None for a number, and other shapes, dtypes or strides."""
    if not isinstance(y, Tensor) or alpha != 1 or not x.is_cpu or x.dtype not in DTYPE_CODES:
        return None
    if (x.shape, x.stride(), x.dtype, x.device) != (y.shape, y.stride(), y.dtype, y.device) or not x.is_contiguous():
        return None
    return record(dropout_forward, y, None, x, 0.0, False, None)


@library_kernel(
    ops.bias_dropout_add,
    *one_dtype("grad"),
    Rank("bias", 0, 1),
    direction="backward",
    source="fusedops_cpu/src/elementwise/dropout.cpp",
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
) -> LibraryCall | tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and bias; that of the residual is grad itself."""
    return dropout_backward(grad, seed, bias, p, training, x_dtype, needs)

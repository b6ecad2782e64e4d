"""squared_relu in the compiled library (``src/elementwise/squared_relu.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import ops
from fusedops_cpu._calls import library_kernel
from fusedops_cpu._constraints import one_dtype
from fusedops_cpu._library import DTYPE_CODES, dense, library
from fusedops_cpu._struct_call import LibraryCall

_SOURCE = "fusedops_cpu/src/elementwise/squared_relu.cpp"


@library_kernel(ops.squared_relu, *one_dtype("x"), source=_SOURCE, rows_independent=True)
def squared_relu(x: Tensor) -> LibraryCall:
    """Compute relu(x) ** 2; x of any rank and strides."""
    x = dense(x)
    y = torch.empty_like(x)
    return LibraryCall(library().squared_relu, (None, x, y, DTYPE_CODES[x.dtype], x.numel()), y)


@library_kernel(ops.squared_relu, *one_dtype("x"), direction="backward", source=_SOURCE, rows_independent=True)
def squared_relu_backward(grad: Tensor, x: Tensor) -> LibraryCall:
    """Compute 2 * grad * relu(x)."""
    grad, x = dense(grad), dense(x)
    dx = torch.empty_like(x)
    return LibraryCall(library().squared_relu, (grad, x, dx, DTYPE_CODES[x.dtype], x.numel()), dx)

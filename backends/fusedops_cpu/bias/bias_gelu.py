"""bias_gelu in the compiled library (``src/elementwise/gelu.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import ops
from fusedops_cpu._constraints import one_dtype, row_bias
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall


@library_kernel(
    ops.bias_gelu,
    *one_dtype("x"),
    *row_bias("x"),
    source="fusedops_cpu/src/elementwise/gelu.cpp",
    rows_independent=True,
)
def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> LibraryCall:
    """Compute gelu(x + bias); x of any rank and strides."""
    x = dense(x)
    bias = bias if bias is None else dense(bias)
    y = torch.empty_like(x)
    columns = 0 if bias is None else bias.numel()
    fields = (x, bias, y, DTYPE_CODES[x.dtype], x.numel(), columns, approximate == "tanh")
    return LibraryCall(library().gelu_forward, fields, y)


@library_kernel(
    ops.bias_gelu,
    *one_dtype("x"),
    *row_bias("x"),
    direction="backward",
    source="fusedops_cpu/src/elementwise/gelu.cpp",
    rows_independent=True,
)
def bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> LibraryCall | tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and bias; the sum for the bias does not depend on the number of threads."""
    grad, x = dense(grad), dense(x)
    dx = torch.empty_like(x) if needs[0] else None
    dbias = None
    if bias is not None:
        bias = dense(bias)
        dbias = torch.empty_like(bias) if needs[1] else None
    if not x.numel():
        return dx, None if dbias is None else dbias.zero_()
    columns = 0 if bias is None else bias.numel()
    fields = (grad, x, bias, dx, dbias, DTYPE_CODES[x.dtype], x.numel(), columns, approximate == "tanh")
    return LibraryCall(library().gelu_backward, fields, (dx, dbias))

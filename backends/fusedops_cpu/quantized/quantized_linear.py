"""quantized_linear in the compiled library (``src/dot/quantized.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import ops
from fusedops.quantization import FORMATS
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu.launch.calls import library_kernel, results_of
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall

_CODES = {name: code for code, name in enumerate(FORMATS)}  # as src/tile/quantized.h has them


@library_kernel(
    ops.quantized_linear,
    *any_dtype("x", "bias"),
    source="fusedops_cpu/src/dot/quantized.cpp",
    rows_independent=True,
)
def quantized_linear(x: Tensor, packed: Tensor, bias: Tensor | None, format: str) -> LibraryCall:
    """Compute the op: a weight is multiplied where it is unpacked, or tiles of 32 rows of the weight are unpacked.

    A row of the result has the same bits whatever the other rows are.
    """
    x, packed = dense(x), dense(packed)
    bias = bias if bias is None else dense(bias)
    y = x.new_empty((*x.shape[:-1], packed.shape[0]))
    sizes = (x.shape[:-1].numel(), x.shape[-1], packed.shape[0])
    dtypes = (DTYPE_CODES[x.dtype], 0 if bias is None else DTYPE_CODES[bias.dtype])
    return LibraryCall(library().quantized_forward, (x, packed, bias, y, *dtypes, _CODES[format], *sizes), y)


@library_kernel(
    ops.quantized_linear,
    *any_dtype("grad", "bias"),
    direction="backward",
    source="fusedops_cpu/src/dot/quantized.cpp",
    rows_independent=True,
)
def quantized_linear_backward(
    grad: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    format: str,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> LibraryCall | tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x, whose rows do not depend on each other, and of bias."""
    dbias = None
    if needs[1] and bias is not None:
        dbias = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1]).float().sum(0).to(bias.dtype)
    if not needs[0]:
        return None, dbias
    grad, packed = dense(grad), dense(packed)
    sizes = FORMATS[format]
    columns = packed.shape[1] // sizes.bytes * sizes.weights
    dx = grad.new_empty((*grad.shape[:-1], columns))
    fields = (DTYPE_CODES[grad.dtype], _CODES[format], grad.shape[:-1].numel(), columns, grad.shape[-1])
    call = LibraryCall(library().quantized_backward, (grad, packed, dx, *fields), (dx, None))
    return call if dbias is None else (results_of(call)[0], dbias)

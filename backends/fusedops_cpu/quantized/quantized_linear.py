"""quantized_linear in the compiled library (``src/dot/quantized.cpp``)."""

from __future__ import annotations

from torch import Tensor

from fusedops import ops
from fusedops.constraints import OneOf
from fusedops.ops.quantized.quantized_linear import QuantizedLinearArgs, QuantizedLinearGradArgs
from fusedops.quantization import weights_of_row
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu.launch.calls import library_kernel, results_of
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall

_FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_CODES = {name: code for code, name in enumerate(_FORMATS)}  # as src/tile/quantized.h has them


@library_kernel(
    ops.quantized_linear,
    *any_dtype("x", "bias"),
    OneOf("format", *_FORMATS),
    source="fusedops_cpu/src/dot/quantized.cpp",
    rows_independent=True,
)
def quantized_linear(a: QuantizedLinearArgs) -> LibraryCall:
    """Compute the op: a weight is multiplied where it is unpacked, or tiles of 32 rows of the weight are unpacked.

    A row of the result has the same bits whatever the other rows are.
    """
    assert a.format is not None  # by the op's constraints
    x, packed = dense(a.x), dense(a.packed)
    bias = a.bias if a.bias is None else dense(a.bias)
    y = x.new_empty((*x.shape[:-1], packed.shape[0]))
    sizes = (x.shape[:-1].numel(), x.shape[-1], packed.shape[0])
    dtypes = (DTYPE_CODES[x.dtype], 0 if bias is None else DTYPE_CODES[bias.dtype])
    return LibraryCall(library().quantized_forward, (x, packed, bias, y, *dtypes, _CODES[a.format], *sizes), y)


@library_kernel(
    ops.quantized_linear,
    *any_dtype("grad", "bias"),
    OneOf("format", *_FORMATS),
    direction="backward",
    source="fusedops_cpu/src/dot/quantized.cpp",
    rows_independent=True,
)
def quantized_linear_backward(a: QuantizedLinearGradArgs) -> LibraryCall | tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x, whose rows do not depend on each other, and of bias."""
    assert a.format is not None  # by the op's constraints
    dbias = None
    if a.needs[1] and a.bias is not None:
        dbias = a.grad.reshape(a.grad.shape[:-1].numel(), a.grad.shape[-1]).float().sum(0).to(a.bias.dtype)
    if not a.needs[0]:
        return None, dbias
    grad, packed = dense(a.grad), dense(a.packed)
    columns = weights_of_row(packed.shape[1], a.format)
    dx = grad.new_empty((*grad.shape[:-1], columns))
    fields = (DTYPE_CODES[grad.dtype], _CODES[a.format], grad.shape[:-1].numel(), columns, grad.shape[-1])
    call = LibraryCall(library().quantized_backward, (grad, packed, dx, *fields), (dx, None))
    return call if dbias is None else (results_of(call)[0], dbias)

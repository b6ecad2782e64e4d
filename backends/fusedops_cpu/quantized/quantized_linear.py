"""quantized_linear in the compiled library (``src/dot/quantized.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import ops
from fusedops.constraints import ScaleGroups
from fusedops.ops.quantized.quantized_linear import QuantizedLinearArgs, QuantizedLinearGradArgs
from fusedops.quantization import FORMATS, SCALED, weights_of_row
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu.launch.calls import library_kernel, results_of
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import Field, LibraryCall, LibraryFunction

# as src/tile/scaled.h has them: those of GGUF by their places, others by their codes
_E2M1, _E2M1_OF_16, _FP8, _INT4, _NF4 = range(10, 15)
_CODES = {
    **{name: code for code, name in enumerate(FORMATS)},
    **dict.fromkeys(("MXFP4", "FP4_GROUP32"), _E2M1),
    "NVFP4": _E2M1_OF_16,
    **dict.fromkeys(("FP8_BLOCK", "FP8_ROW", "FP8_TENSOR"), _FP8),
    "INT4_GROUP": _INT4,
    "NF4": _NF4,
}
_E8M0, _E4M3 = 8, 9  # the codes of scales that are bytes
# of 32 columns, which have one scale
_WHOLE_BLOCKS = ScaleGroups("packed", "scales", "format", 32)


def weight_fields(
    format: str, codes: Tensor, scales: Tensor | None, global_scale: Tensor | None, zeros: Tensor | None
) -> tuple[Field, ...]:
    """Return the fields of a PackedWeight (``src/api.h``)."""
    if scales is None:
        return (dense(codes), None, None, None, _CODES[format], codes.shape[-1], 0, 1, 1, 1)
    data, columns, groups = SCALED[format], weights_of_row(codes.shape[-1], format), scales.shape[-1]
    if scales.dtype is torch.float64:
        scales = scales.float()
    dtype = DTYPE_CODES[scales.dtype] if scales.is_floating_point() else _E4M3 if data.e4m3 else _E8M0
    one = None if global_scale is None else dense(global_scale.float())
    zeros = None if zeros is None else dense(zeros)
    group = data.group or max(columns // max(groups, 1), 1)
    sizes = (_CODES[format], codes.shape[-1], dtype, groups, group, data.rows)
    return (dense(codes), dense(scales), one, zeros, *sizes)


def quantized_linear_by_rows(a: QuantizedLinearArgs) -> LibraryCall:
    """Compute the op; a weight is multiplied where it is unpacked; for more rows, a few of its rows are unpacked.

    A row of the result has the same bits whatever the other rows are.
    """
    return _forward(library().quantized_forward, a)


@library_kernel(
    ops.quantized_linear,
    *any_dtype("x", "bias"),
    _WHOLE_BLOCKS,
    source="fusedops_cpu/src/dot/quantized.cpp",
    rows_independent=True,
    for_rows=quantized_linear_by_rows,
)
def quantized_linear(a: QuantizedLinearArgs) -> LibraryCall:
    """Compute the op; many rows, of bfloat16 by pairs of integers, or one of FP8, add their terms in another order."""
    return _forward(library().quantized_in_order, a)


def _forward(function: LibraryFunction, a: QuantizedLinearArgs) -> LibraryCall:
    assert a.format is not None  # by the op's constraints
    x, bias, outputs = dense(a.x), None if a.bias is None else dense(a.bias), a.packed.shape[0]
    y = x.new_empty((*x.shape[:-1], outputs))
    weight = weight_fields(a.format, a.packed, a.scales, a.global_scale, a.zeros)
    sizes = (x.shape[:-1].numel(), x.shape[-1], outputs)
    dtypes = (DTYPE_CODES[x.dtype], 0 if bias is None else DTYPE_CODES[bias.dtype])
    return LibraryCall(function, (x, *weight, bias, y, *dtypes, *sizes), y)


@library_kernel(
    ops.quantized_linear,
    *any_dtype("grad", "bias"),
    _WHOLE_BLOCKS,
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
    grad, columns = dense(a.grad), weights_of_row(a.packed.shape[1], a.format)
    dx = grad.new_empty((*grad.shape[:-1], columns))
    weight = weight_fields(a.format, a.packed, a.scales, a.global_scale, a.zeros)
    sizes = (DTYPE_CODES[grad.dtype], grad.shape[:-1].numel(), columns, grad.shape[-1])
    call = LibraryCall(library().quantized_backward, (grad, *weight, dx, *sizes), (dx, None))
    return call if dbias is None else (results_of(call)[0], dbias)

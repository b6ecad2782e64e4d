"""int8_linear in the compiled library (``src/dot/int8.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import ops
from fusedops.constraints import DType
from fusedops.ops.quantized.int8_linear import Int8LinearArgs, output_dtype
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall
from fusedops_cpu.linear.products import multiply

_CODES = {**DTYPE_CODES, torch.int8: 3}
_CHUNK = 2**20  # numbers of the weight that are in float32 at a time: 4 MiB


@library_kernel(
    ops.int8_linear,
    DType("x", *_CODES),
    *any_dtype("bias", "smooth"),
    source="fusedops_cpu/src/dot/int8.cpp",
    rows_independent=True,
)
def int8_linear(a: Int8LinearArgs) -> LibraryCall:
    """Compute the op; the weight and its scales are read where they lie."""
    x, x_scale = dense(a.x), None if a.x_scale is None else dense(a.x_scale.float())
    bias, smooth = (each if each is None else dense(each) for each in (a.bias, a.smooth))
    weight = a.weight if a.weight.stride(1) == 1 and not a.weight.is_neg() else dense(a.weight)
    weight_scale = a.weight_scale.resolve_neg().float()
    y = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=output_dtype(a))
    dtypes = (_CODES[each.dtype] if each is not None else 0 for each in (x, bias, smooth, y))
    sizes = (x.shape[:-1].numel(), weight.shape[1], weight.shape[0], weight.stride(0), weight_scale.stride(0))
    tensors = (x, x_scale, weight, weight_scale, bias, smooth, y)
    return LibraryCall(library().int8_linear, (*tensors, *dtypes, *sizes), y)


@library_kernel(
    ops.int8_linear,
    *any_dtype("grad", "bias", "smooth"),
    direction="backward",
    source="fusedops_cpu/src/dot/linear_product.cpp",
    rows_independent=True,
)
def int8_linear_backward(
    grad: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    smooth: Tensor | None,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients; chunks of rows of the weight are added in order, so that rows of dx are independent."""
    g = dense(grad).reshape(grad.shape[:-1].numel(), grad.shape[-1]).float()
    dx = dbias = None
    if needs[0]:
        dx = g.new_zeros((g.shape[0], weight.shape[1]))
        step = max(16, _CHUNK // max(weight.shape[1], 1))
        for start in range(0, weight.shape[0] if dx.numel() else 0, step):
            at = slice(start, start + step)
            part = weight[at].float().mul_(weight_scale[at, None].float())
            multiply(g[:, at], part.t(), dx, in_bfloat16=False, adds=True)
        dx = dx if smooth is None else dx.div_(smooth.float())
        dx = dx.view(*grad.shape[:-1], weight.shape[1]).to(x_dtype)
    if needs[1] and bias is not None:
        dbias = g.sum(0).to(bias.dtype)
    return dx, dbias

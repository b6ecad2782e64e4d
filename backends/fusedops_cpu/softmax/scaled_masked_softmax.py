"""scaled_masked_softmax in the compiled library (``src/elementwise/softmax.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import ops
from fusedops_cpu._constraints import one_dtype
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.library import DTYPE_CODES, MAX_DIMS, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall


@library_kernel(
    ops.scaled_masked_softmax,
    *one_dtype("x"),
    source="fusedops_cpu/src/elementwise/softmax.cpp",
    rows_independent=True,
)
def scaled_masked_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> LibraryCall:
    """Compute the probabilities; x of any rank and strides, a mask that broadcasts to it."""
    x = dense(x)
    y = torch.empty_like(x)
    shape = x.shape
    sq, sk = shape[-2:]
    rows = x.numel() // (sk or 1)
    masks = (0, 0)
    if mask is not None:
        strides = mask.stride()
        if len(shape) > MAX_DIMS:
            mask, shape = mask.expand(shape).reshape(rows, sk), (rows, sk)
            strides = mask.stride()
        if strides and strides[-1] > 1:  # the library reads masks of a row side by side, or one for the row
            mask = mask.contiguous()
            strides = mask.stride()
        masks = (len(shape), len(strides), *shape, *mask.shape, *strides)
    fields = (x, mask, y, DTYPE_CODES[x.dtype], rows, sq, sk, causal, scale, *masks)
    return LibraryCall(library().softmax_forward[len(masks) - 2], fields, y)


@library_kernel(
    ops.scaled_masked_softmax,
    *one_dtype("y"),
    direction="backward",
    source="fusedops_cpu/src/elementwise/softmax.cpp",
    rows_independent=True,
)
def scaled_masked_softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> LibraryCall:
    """Compute the gradient of x from the saved y."""
    grad, y = dense(grad), dense(y)
    dx = torch.empty_like(y)
    sq, sk = y.shape[-2:]
    rows = y.numel() // (sk or 1)
    fields = (grad, y, dx, DTYPE_CODES[y.dtype], rows, sq, sk, causal, scale)
    return LibraryCall(library().softmax_backward, fields, dx)

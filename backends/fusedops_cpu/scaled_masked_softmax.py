"""scaled_masked_softmax in the compiled library (``src/softmax.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops_cpu._constraints import one_dtype
from fusedops_cpu._library import (
    DTYPE_CODES,
    MAX_DIMS,
    SOFTMAX_BACKWARD,
    SOFTMAX_FORWARD,
    dense,
    failure,
    library,
)


@kernel(ops.scaled_masked_softmax, *one_dtype("x"), source="fusedops_cpu/src/softmax.cpp")
def scaled_masked_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute the probabilities; x of any rank and strides, a mask that broadcasts to it."""
    x = dense(x)
    y = torch.empty_like(x)
    shape = x.shape
    sq, sk = shape[-2:]
    rows = x.numel() // (sk or 1)
    if mask is None:
        arguments = SOFTMAX_FORWARD[0](
            x.data_ptr(), 0, y.data_ptr(), DTYPE_CODES[x.dtype], rows, sq, sk, causal, scale, 0, 0
        )
    else:
        strides = mask.stride()
        if len(shape) > MAX_DIMS:
            mask, shape = mask.expand(shape).reshape(rows, sk), (rows, sk)
            strides = mask.stride()
        if strides and strides[-1] > 1:  # the library reads masks of a row side by side, or one for the row
            mask = mask.contiguous()
            strides = mask.stride()
        dims, mask_dims = len(shape), len(strides)
        arguments = SOFTMAX_FORWARD[dims + 2 * mask_dims](
            x.data_ptr(), mask.data_ptr(), y.data_ptr(), DTYPE_CODES[x.dtype], rows, sq, sk, causal, scale,
            dims, mask_dims, *shape, *mask.shape, *strides,
        )  # fmt: skip
    if status := library().softmax_forward(arguments):
        raise failure(status)
    return y


@kernel(ops.scaled_masked_softmax, *one_dtype("y"), direction="backward", source="fusedops_cpu/src/softmax.cpp")
def scaled_masked_softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Compute the gradient of x from the saved y."""
    grad, y = dense(grad), dense(y)
    dx = torch.empty_like(y)
    sq, sk = y.shape[-2:]
    rows = y.numel() // (sk or 1)
    if status := library().softmax_backward(
        SOFTMAX_BACKWARD(
            grad.data_ptr(), y.data_ptr(), dx.data_ptr(), DTYPE_CODES[y.dtype], rows, sq, sk, causal, scale
        )
    ):
        raise failure(status)
    return dx

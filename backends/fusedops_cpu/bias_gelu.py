"""bias_gelu in the compiled library (``src/gelu.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops_cpu._constraints import one_dtype, row_bias
from fusedops_cpu._library import (
    DTYPE_CODES,
    GELU_BACKWARD,
    GELU_FORWARD,
    dense,
    failure,
    library,
)


@kernel(ops.bias_gelu, *one_dtype("x"), *row_bias("x"), source="fusedops_cpu/src/gelu.cpp")
def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Compute gelu(x + bias); x of any rank and strides."""
    x = dense(x)
    bias = bias if bias is None else dense(bias)
    y = torch.empty_like(x)
    if status := library().gelu_forward(
        GELU_FORWARD(
            x.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            DTYPE_CODES[x.dtype],
            x.numel(),
            0 if bias is None else bias.numel(),
            approximate == "tanh",
        )
    ):
        raise failure(status)
    return y


@kernel(ops.bias_gelu, *one_dtype("x"), *row_bias("x"), direction="backward", source="fusedops_cpu/src/gelu.cpp")
def bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and bias; the sum for the bias does not depend on the number of threads."""
    grad, x = dense(grad), dense(x)
    dx = torch.empty_like(x) if needs[0] else None
    dbias = None
    if bias is not None:
        bias = dense(bias)
        dbias = torch.empty_like(bias) if needs[1] else None
    if not x.numel():
        return dx, None if dbias is None else dbias.zero_()
    if status := library().gelu_backward(
        GELU_BACKWARD(
            grad.data_ptr(),
            x.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if dx is None else dx.data_ptr(),
            0 if dbias is None else dbias.data_ptr(),
            DTYPE_CODES[x.dtype],
            x.numel(),
            0 if bias is None else bias.numel(),
            approximate == "tanh",
        )
    ):
        raise failure(status)
    return dx, dbias

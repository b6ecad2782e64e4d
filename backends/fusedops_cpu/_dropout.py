"""The launchers of bias_dropout and bias_dropout_add (``src/dropout.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.philox import threshold
from fusedops_cpu._library import (
    DROPOUT_BACKWARD,
    DROPOUT_FORWARD,
    DTYPE_CODES,
    dense,
    failure,
    library,
)

_ALL = 2**32  # the threshold above every random word: all elements are dropped


def dropout_forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, training: bool, seed: Tensor | None
) -> Tensor:
    """Return ``dropout(x + bias)``, or ``residual + dropout(x + bias)``.

    Args:
        x: (...), float32, bfloat16 or float16, any strides.
        bias: one row of x, or one number, of the dtype of x; or None.
        residual: (...), of the shape and dtype of x, or None.
        p: probability of dropping an element, in [0, 1].
        training: False drops nothing.
        seed: int64, one element, or None where nothing is dropped.

    Returns:
        (...), contiguous, the dtype of x. Computed in float32.
    """
    limit = threshold(p) if training else 0
    x = dense(x)
    if limit == _ALL:
        return torch.zeros_like(x) if residual is None else residual.clone(memory_format=torch.contiguous_format)
    bias = bias if bias is None else dense(bias)
    residual = residual if residual is None else dense(residual)  # a local: a copy has to live until the call returns
    y = torch.empty_like(x)
    if status := library().dropout_forward(
        DROPOUT_FORWARD(
            x.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            y.data_ptr(),
            seed.data_ptr() if limit and seed is not None else 0,
            DTYPE_CODES[x.dtype],
            x.numel(),
            0 if bias is None else bias.numel(),
            limit,
            1 / (1 - p) if limit else 1.0,
        )
    ):
        raise failure(status)
    return y


def dropout_backward(
    grad: Tensor,
    seed: Tensor | None,
    bias: Tensor | None,
    p: float,
    training: bool,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the bias, with the mask of the seed; None where not wanted.

    Args:
        grad: (...), float32, bfloat16 or float16, any strides.
        seed: as in the forward.
        bias: as in the forward; its values are not read.
        p: as in the forward.
        training: as in the forward.
        x_dtype: dtype of the gradient of x.
        needs: the gradient of x is wanted; that of the bias is wanted.

    Returns:
        (...), contiguous, and the bias's shape and dtype. Summed in float32, in one order.
    """
    limit = threshold(p) if training else 0
    if x_dtype is not grad.dtype or (bias is not None and bias.dtype is not grad.dtype):
        # the residual has another dtype than x or bias; rounded once, from float32
        wide_bias = bias if bias is None else bias.float()
        dx, dbias = dropout_backward(grad.float(), seed, wide_bias, p, training, torch.float32, needs)
        return (
            dx if dx is None else dx.to(x_dtype),
            dbias if dbias is None or bias is None else dbias.to(bias.dtype),
        )
    dbias = None
    if bias is not None:
        dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if needs[1] else None
    grad = dense(grad)
    dx = torch.empty_like(grad) if needs[0] else None
    if limit == _ALL or not grad.numel():
        return None if dx is None else dx.zero_(), None if dbias is None else dbias.zero_()
    if status := library().dropout_backward(
        DROPOUT_BACKWARD(
            grad.data_ptr(),
            0 if dx is None else dx.data_ptr(),
            0 if dbias is None else dbias.data_ptr(),
            seed.data_ptr() if limit and seed is not None else 0,
            DTYPE_CODES[grad.dtype],
            grad.numel(),
            0 if dbias is None else dbias.numel(),
            limit,
            1 / (1 - p) if limit else 1.0,
        )
    ):
        raise failure(status)
    return dx, dbias

"""The launchers of bias_dropout and bias_dropout_add (``src/elementwise/dropout.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.philox import threshold
from fusedops_cpu.launch.calls import results_of
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall

_ALL = 2**32  # the threshold above every random word: all elements are dropped


def dropout_forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, training: bool, seed: Tensor | None
) -> LibraryCall | Tensor:
    """Return ``dropout(x + bias)``, or ``residual + dropout(x + bias)``, or the call that computes it.

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
    columns = 0 if bias is None else bias.numel()
    seed = None if seed is None else dense(seed)  # of a limit of 0 it is not read, but a freed one is refused
    scale = 1 / (1 - p) if limit else 1.0
    fields = (x, bias, residual, y, seed, DTYPE_CODES[x.dtype], x.numel(), columns, limit, scale)
    return LibraryCall(library().dropout_forward, fields, y)


def dropout_backward(
    grad: Tensor,
    seed: Tensor | None,
    bias: Tensor | None,
    p: float,
    training: bool,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> LibraryCall | tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the bias, or the call that computes them; None where not wanted.

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
        dx, dbias = results_of(dropout_backward(grad.float(), seed, wide_bias, p, training, torch.float32, needs))
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
    columns = 0 if dbias is None else dbias.numel()
    seed = None if seed is None else dense(seed)  # of a limit of 0 it is not read, but a freed one is refused
    scale = 1 / (1 - p) if limit else 1.0
    fields = (grad, dx, dbias, seed, DTYPE_CODES[grad.dtype], grad.numel(), columns, limit, scale)
    return LibraryCall(library().dropout_backward, fields, (dx, dbias))

"""The launchers of the norms (``src/norm.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops_cpu._library import (
    DTYPE_CODES,
    NORM_BACKWARD,
    NORM_FORWARD,
    dense,
    failure,
    library,
)


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    centered: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return y, s, the mean and rstd of ``y = norm(s)`` with ``s = x + residual``.

    Args:
        x: (..., H), float32, bfloat16 or float16, any strides.
        residual: (..., H), the dtype of x, or None: s is x then.
        weight: (H,), any of the dtypes, or None.
        bias: (H,), any of the dtypes, or None.
        eps: added to the mean square, or to the variance.
        offset: added to the weight.
        centered: True for LayerNorm, False for RMSNorm.
        save: return the mean (of LayerNorm) and rstd, (...), float32; else None.
    """
    x = dense(x)
    y = torch.empty_like(x)
    s = x
    if residual is not None:
        residual, s = dense(residual), torch.empty_like(x)
    weight = weight if weight is None else dense(weight)
    bias = bias if bias is None else dense(bias)
    shape = x.shape
    rstd = x.new_empty(shape[:-1], dtype=torch.float32) if save else None
    mean = None if rstd is None or not centered else torch.empty_like(rstd)
    columns = shape[-1]
    if status := library().norm_forward(
        NORM_FORWARD(
            x.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            0 if residual is None else s.data_ptr(),
            0 if mean is None else mean.data_ptr(),
            0 if rstd is None else rstd.data_ptr(),
            DTYPE_CODES[x.dtype],
            0 if weight is None else DTYPE_CODES[weight.dtype],
            0 if bias is None else DTYPE_CODES[bias.dtype],
            x.numel() // columns if columns else shape[:-1].numel(),
            columns,
            centered,
            eps,
            offset,
        )
    ):
        raise failure(status)
    return y, s, mean, rstd


def norm_backward(
    grad: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offset: float,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, the residual, the weight and the bias; None where not wanted.

    Args:
        grad: (..., H), the gradient of y, of the dtype of s, any strides.
        grad_s: (..., H), the gradient of s, of its dtype, or None without a residual.
        s: (..., H), what was normalized.
        mean: (...), float32, of LayerNorm; None for RMSNorm.
        rstd: (...), float32.
        weight: as in the forward.
        bias: as in the forward; its values are not read.
        offset: as in the forward.
        needs: the gradients of x, residual, weight and bias are wanted.

    Returns:
        Contiguous, of the dtypes of s, s, weight and bias. Sums over rows are in float32, in one order.
    """
    grad, s, rstd = dense(grad), dense(s), dense(rstd)
    grad_s = grad_s if grad_s is None else dense(grad_s)
    mean = mean if mean is None else dense(mean)
    weight = weight if weight is None else dense(weight)
    dx = torch.empty_like(s) if needs[0] else None
    dresidual = torch.empty_like(s) if needs[1] else None
    columns = s.shape[-1]
    dweight = None if weight is None or not needs[2] else torch.empty_like(weight)
    dbias = None if bias is None or not needs[3] else torch.empty_like(bias, memory_format=torch.contiguous_format)
    if not s.numel():
        return (
            dx,
            dresidual,
            dweight if dweight is None else dweight.zero_(),
            dbias if dbias is None else dbias.zero_(),
        )
    if status := library().norm_backward(
        NORM_BACKWARD(
            grad.data_ptr(),
            0 if grad_s is None else grad_s.data_ptr(),
            s.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            0 if mean is None else mean.data_ptr(),
            rstd.data_ptr(),
            0 if dx is None else dx.data_ptr(),
            0 if dresidual is None else dresidual.data_ptr(),
            0 if dweight is None else dweight.data_ptr(),
            0 if dbias is None else dbias.data_ptr(),
            DTYPE_CODES[s.dtype],
            0 if weight is None else DTYPE_CODES[weight.dtype],
            0 if bias is None else DTYPE_CODES[bias.dtype],
            rstd.numel(),
            columns,
            offset,
        )
    ):
        raise failure(status)
    return dx, dresidual, dweight, dbias


def add_norm_backward(
    grad_y: Tensor,
    grad_s: Tensor,
    s: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offset: float,
    residual_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return what :func:`norm_backward` returns, for x of the dtype of grad_y and a residual of ``residual_dtype``.

    Where the two differ, s is float32: the gradients are computed in float32 and then rounded.
    """
    wide_grad = grad_y if grad_y.dtype is s.dtype else grad_y.to(s.dtype)
    dx, dresidual, dweight, dbias = norm_backward(wide_grad, grad_s, s, mean, rstd, weight, bias, offset, needs)
    if dx is not None and wide_grad is not grad_y:
        dx = dx.to(grad_y.dtype)
    if dresidual is not None and residual_dtype is not s.dtype:
        dresidual = dresidual.to(residual_dtype)
    return dx, dresidual, dweight, dbias

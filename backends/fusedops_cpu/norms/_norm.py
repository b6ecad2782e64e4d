"""The launchers of the norms (``src/elementwise/norm.cpp``)."""

from __future__ import annotations

from operator import itemgetter

import torch
from torch import Tensor

from fusedops_cpu.launch.calls import results_of
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall

Results = tuple[Tensor | None, ...]


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    centered: bool,
    save: bool,
) -> LibraryCall:
    """Return the call that computes y, s, the mean and rstd of ``y = norm(s)`` with ``s = x + residual``.

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
    rows = x.numel() // columns if columns else shape[:-1].numel()
    tensors = (x, residual, weight, bias, y, None if residual is None else s, mean, rstd)
    fields = (*tensors, *_dtypes(x, weight, bias), rows, columns, centered, eps, offset)
    return LibraryCall(library().norm_forward, fields, (y, s, mean, rstd))


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
) -> LibraryCall | Results:
    """Return the gradients of x, the residual, the weight and the bias, or the call that computes them.

    Args:
        grad: (..., H), the gradient of y, of the dtype of s, any strides.
        grad_s: (..., H), the gradient of s, of its dtype, or None without a residual.
        s: (..., H), what was normalized.
        mean: (...), float32, of LayerNorm; None for RMSNorm.
        rstd: (...), float32.
        weight: as in the forward.
        bias: as in the forward; its values are not read.
        offset: as in the forward.
        needs: the gradients of x, residual, weight and bias are wanted; the others are None.

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
    gradients = (dx, dresidual, dweight, dbias)
    tensors = (grad, grad_s, s, weight, mean, rstd, *gradients)
    fields = (*tensors, *_dtypes(s, weight, bias), rstd.numel(), columns, offset)
    return LibraryCall(library().norm_backward, fields, gradients)


def _dtypes(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[int, int, int]:
    """Return the codes of the dtypes; 0 for None."""
    return (
        DTYPE_CODES[x.dtype],
        0 if weight is None else DTYPE_CODES[weight.dtype],
        0 if bias is None else DTYPE_CODES[bias.dtype],
    )


def selected(returned: LibraryCall | Results, *places: int) -> LibraryCall | Results:
    """Return results, or a call that returns them, with those at the given places alone."""
    if isinstance(returned, LibraryCall):
        function, fields, results = returned
        return LibraryCall(function, fields, itemgetter(*places)(results))
    return itemgetter(*places)(returned)


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
) -> LibraryCall | Results:
    """Return what :func:`norm_backward` returns, for x of the dtype of grad_y and a residual of ``residual_dtype``.

    Where the two differ, s is float32: the gradients are computed in float32 and then rounded.
    """
    if grad_y.dtype is s.dtype and residual_dtype is s.dtype:
        return norm_backward(grad_y, grad_s, s, mean, rstd, weight, bias, offset, needs)
    dx, dresidual, dweight, dbias = results_of(
        norm_backward(grad_y.to(s.dtype), grad_s, s, mean, rstd, weight, bias, offset, needs)
    )
    return (
        dx if dx is None else dx.to(grad_y.dtype),
        dresidual if dresidual is None else dresidual.to(residual_dtype),
        dweight,
        dbias,
    )

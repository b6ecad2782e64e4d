"""The shared parts of the norm ops: the arithmetic's dtype, the saved values, and gradients from them.

A row is the last dimension of the tensor that is normalized. ``centered`` is True for layer_norm, which subtracts the
mean of the row, and False for rms_norm.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.values import Sharding
from fusedops.constraints import Finite, Floating, LastDims, Rank, SameDevice, SameShape

X = (Floating("x"), Rank("x", at_least=1), Finite("eps", at_least=0.0))
RESIDUAL = (Floating("residual"), SameDevice("residual", "x"), SameShape("residual", "x"))
WEIGHT = (Floating("weight"), SameDevice("weight", "x"), LastDims("weight", "x"))
BIAS = (Floating("bias"), SameDevice("bias", "x"), LastDims("bias", "x"))
# every rank needs whole rows. The gradients of weight and bias are partial sums, of the rows of a rank
ROWS = Sharding(whole=(-1,))


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype of the arithmetic: float32, or float64 for float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def mean_of(x: Tensor) -> Tensor:
    """Return the mean of each row: (...)."""
    return wide(x).mean(-1)


def rstd_of(x: Tensor, eps: float, centered: bool) -> Tensor:
    """Return 1 / sqrt(mean square + eps) of each row, of its difference from the mean if ``centered``: (...)."""
    rows = wide(x)
    if centered:
        rows = rows - rows.mean(-1, keepdim=True)
    return torch.rsqrt(rows.square().mean(-1) + eps)


def normalized(x: Tensor, rstd: Tensor, mean: Tensor | None = None) -> Tensor:
    """Return ``(x - mean) * rstd``, in the dtype of rstd."""
    rows = x.to(rstd.dtype)
    return (rows if mean is None else rows - mean[..., None]) * rstd[..., None]


def factor(weight: Tensor | None, offset: float, dtype: torch.dtype) -> Tensor | None:
    """Return ``offset + weight`` in ``dtype``, or None."""
    return None if weight is None else weight.to(dtype) + offset


def row_gradient(grad: Tensor, normal: Tensor, rstd: Tensor, scale: Tensor | None, centered: bool) -> Tensor:
    """Return the gradient of a normalized row: ``rstd * (m - normal * mean(m * normal))`` with ``m = grad * scale``.

    Args:
        grad: (..., H), the gradient of y, in the dtype of the arithmetic.
        normal: (..., H), see :func:`normalized`.
        rstd: (...).
        scale: (H,), see :func:`factor`, or None.
        centered: True also subtracts the mean of m.
    """
    m = grad if scale is None else grad * scale
    inner = m - normal * (m * normal).mean(-1, keepdim=True)
    if centered:
        inner = inner - m.mean(-1, keepdim=True)
    return rstd[..., None] * inner


def summed(rows: Tensor, like: Tensor) -> Tensor:
    """Return the sum over all rows, in the shape and dtype of a weight or bias."""
    return rows.sum_to_size(like.shape).to(like.dtype, copy=True)


def row_bytes(x: Any, dtypes: tuple[torch.dtype, ...], vectors: tuple[Any, ...]) -> int:
    """Return the bytes of tensors of the shape of x, of these dtypes, and of the weight and bias that are not None."""
    small = sum(prod(vector.shape) * vector.dtype.itemsize for vector in vectors if vector is not None)
    return prod(x.shape) * sum(dtype.itemsize for dtype in dtypes) + small


def sum_dtype(x: Any, residual: Any) -> torch.dtype:
    """Return the dtype of ``x + residual``, by torch's promotion."""
    return torch.promote_types(x.dtype, residual.dtype)


def empty_pair(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty outputs y and s of an add form: y in the dtype of x, s in that of the sum."""
    layout = torch.contiguous_format
    return torch.empty_like(x, memory_format=layout), torch.empty_like(
        x, dtype=sum_dtype(x, residual), memory_format=layout
    )


def rounded_sum(x: Tensor, residual: Tensor) -> Tensor:
    """Return ``x + residual``, computed in float32 (float64 for float64) and rounded to the promoted dtype."""
    dtype = sum_dtype(x, residual)
    exact = torch.promote_types(dtype, torch.float32)
    return (x.to(exact) + residual.to(exact)).to(dtype)


def sum_gradients(
    ds: Tensor, x_dtype: torch.dtype, residual_dtype: torch.dtype, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and residual from the gradient of their sum: two tensors of the same values."""
    dx = ds.to(x_dtype, copy=True) if needs[0] else None  # no two results of backward share memory
    return dx, ds.to(residual_dtype, copy=True) if needs[1] else None

"""The formulas of the norm ops: one norm, with or without the mean, a bias and a residual, and its gradients.

A row is the last dimension of the tensor that is normalized. ``centered`` is True for LayerNorm, which subtracts the
mean of the row, and False for RMSNorm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, promoted, upcast
from fusedops.ops.gated.formulas import activated


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    centered: bool,
) -> tuple[Tensor, Tensor]:
    """Compute y, (..., H) in the dtype of x, and the rows that it normalizes: x, or ``x + residual`` if there is one.

    Args:
        x: (..., H).
        residual: (..., H), or None.
        weight: (H,), or None.
        bias: (H,), or None.
        eps: added to the mean square.
        offset: added to the weight.
        centered: True subtracts the mean of a row first.
    """
    s = x if residual is None else rounded_sum(x, residual)
    y = normalized(s, rstd_of(s, eps, centered), mean_of(s) if centered else None)
    if weight is not None:
        y = y * _scale(weight, offset, y.dtype)
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype), s


def gradients(
    grad: Tensor,
    s: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offset: float,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of the rows, in the dtype of rstd, and of weight and bias, in their own.

    With ``m = grad * (weight + offset)`` and the normalized row n, the gradient of a row is
    ``rstd * (m - n * mean(m * n))``, for LayerNorm less ``rstd * mean(m)``.

    Args:
        grad: (..., H), the gradient of y.
        s: (..., H), the rows that were normalized.
        mean: (...), of LayerNorm, else None.
        rstd: (...).
        weight: (H,), or None.
        bias: (H,), or None.
        offset: added to the weight.
        needs: the gradients to compute: of the rows, weight and bias.
    """
    normal, g = normalized(s, rstd, mean), grad.to(rstd.dtype)
    dweight = summed(g * normal, weight) if weight is not None and needs[1] else None
    dbias = summed(g, bias) if bias is not None and needs[2] else None
    if not needs[0]:
        return None, dweight, dbias
    m = g if weight is None else g * _scale(weight, offset, g.dtype)
    inner = m - normal * (m * normal).mean(-1, keepdim=True)
    if mean is not None:
        inner = inner - m.mean(-1, keepdim=True)
    return rstd[..., None] * inner, dweight, dbias


def residual_gradients(
    grad: Tensor,
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
    """Compute the gradients of x, residual, weight and bias of a norm that adds a residual first.

    Args:
        grad: (..., H), the gradient of y, in the dtype of x.
        grad_s: (..., H), the gradient of the sum.
        s: as in :func:`gradients`, with ``mean``, ``rstd``, ``weight``, ``bias`` and ``offset``.
        mean: as there.
        rstd: as there.
        weight: as there.
        bias: as there.
        offset: as there.
        residual_dtype: of the gradient of the residual.
        needs: the gradients to compute.
    """
    wanted = (needs[0] or needs[1], needs[2], needs[3])
    ds, dweight, dbias = gradients(grad, s, mean, rstd, weight, bias, offset, wanted)
    if ds is None:
        return None, None, dweight, dbias
    ds = ds + grad_s.to(ds.dtype)
    dx = ds.to(grad.dtype, copy=True) if needs[0] else None  # no two results of backward share memory
    return dx, ds.to(residual_dtype, copy=True) if needs[1] else None, dweight, dbias


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    gate_first: bool,
    activation: str,
    groups: int,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """Compute y, (..., H) in the dtype of x, and rstd, (..., groups), of RMSNorm beside a gate.

    Args:
        x: (..., H).
        gate: (..., H).
        weight: (H,), or None.
        eps: added to the mean square.
        gate_first: True normalizes ``x * act(gate)``, False multiplies the normalized x by ``act(gate)``.
        activation: "silu" or "sigmoid".
        groups: parts of a row, each with a norm of its own.
        offset: added to the weight.
    """
    wide = compute_dtype(promoted(x, gate))
    act, _ = activated(gate.to(wide), activation)
    rows = in_groups(x.to(wide) * act if gate_first else x.to(wide), groups)
    rstd = rstd_of(rows, eps, centered=False)
    y = normalized(rows, rstd, None).flatten(-2)
    if weight is not None:
        y = y * _scale(weight, offset, wide)
    return (y if gate_first else y * act).to(x.dtype), rstd


def gated_gradients(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    gate_first: bool,
    activation: str,
    groups: int,
    offset: float,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, gate and weight, each in its dtype.

    Args:
        grad: (..., H), the gradient of y.
        x: as in :func:`gated_norm`, with ``gate``, ``weight``, ``gate_first``, ``activation``, ``groups``, ``offset``.
        gate: as there.
        rstd: (..., groups).
        weight: as there.
        gate_first: as there.
        activation: as there.
        groups: as there.
        offset: as there.
        needs: the gradients to compute.
    """
    wide = rstd.dtype
    act, slope = activated(gate.to(wide), activation)
    rows, g = x.to(wide), grad.to(wide)
    normed = rows * act if gate_first else rows
    of_norm = in_groups(g if gate_first else g * act, groups)
    parts = None if weight is None else in_groups(weight, groups)
    wanted = (needs[0] or (needs[1] and gate_first), needs[2], False)
    drows, dweight, _ = gradients(of_norm, in_groups(normed, groups), None, rstd, parts, None, offset, wanted)
    dx = dgate = None
    if drows is not None:
        drows = drows.flatten(-2)
        dx = (drows * act if gate_first else drows).to(x.dtype) if needs[0] else None
    if needs[1]:
        if drows is not None and gate_first:
            dact = drows * rows
        else:
            dact = g * normalized(in_groups(rows, groups), rstd, None).flatten(-2)
            dact = dact if weight is None else dact * _scale(weight, offset, wide)
        dgate = (dact * slope).to(gate.dtype)
    return dx, dgate, None if dweight is None else dweight.flatten()


def in_groups(rows: Tensor, groups: int) -> Tensor:
    """Return a view (..., groups, H / groups) of rows (..., H)."""
    return rows.view(*rows.shape[:-1], groups, rows.shape[-1] // groups)


def mean_of(x: Tensor) -> Tensor:
    """Return the mean of each row: (...)."""
    return upcast(x).mean(-1)


def rstd_of(x: Tensor, eps: float, centered: bool) -> Tensor:
    """Return 1 / sqrt(mean square + eps) of each row, of its difference from the mean if ``centered``: (...)."""
    rows = upcast(x)
    if centered:
        rows = rows - rows.mean(-1, keepdim=True)
    return torch.rsqrt(rows.square().mean(-1) + eps)


def normalized(x: Tensor, rstd: Tensor, mean: Tensor | None) -> Tensor:
    """Return ``(x - mean) * rstd``, in the dtype of rstd."""
    rows = x.to(rstd.dtype)
    return (rows if mean is None else rows - mean[..., None]) * rstd[..., None]


def rounded_sum(x: Tensor, residual: Tensor) -> Tensor:
    """Return ``x + residual``, rounded once to the promoted dtype."""
    dtype = promoted(x, residual)
    exact = compute_dtype(dtype)
    return (x.to(exact) + residual.to(exact)).to(dtype)


def empty_pair(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty outputs y, in the dtype of x, and s, in the dtype of the sum."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, torch.empty_like(y, dtype=promoted(x, residual))


def _scale(weight: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) + offset


def summed(rows: Tensor, like: Tensor) -> Tensor:
    """Return the sum over all rows, in the shape and dtype of a weight or bias."""
    return rows.sum_to_size(like.shape).to(like.dtype, copy=True)

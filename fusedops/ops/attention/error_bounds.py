"""The error bounds of attention: the changes of the results where products and probabilities are rounded.

A score is a sum of D products of exact inputs in float32: it moves by the rounding of the arithmetic, whatever the
dtype of the inputs. Probabilities and their gradients may be rounded to the dtype of the inputs before the next
product, as fused kernels do.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype
from fusedops.ops.attention import formulas

# of a score, in proportion to |q| @ |k|: float32 sums of up to 512 products in any order, and of more as much more
_ARITHMETIC, _PRODUCTS = 2e-6, 512
_SUMS = 2e-5  # of a gradient's term, in float32
_BLOCK = 256  # rows of queries
_SPREAD = 1  # times the root of the sum of the squares of the terms' roundings, where no terms are equal


def error_bound(
    absolute: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: str,
    window: tuple[int, int] | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Return the changes of out and lse; inf where a score may overflow."""
    p, move, unknown, _ = _moves(absolute, q, k, mask, scale, causal, window)
    values = formulas.for_each_query_head(formulas.finite(v.double()), q)
    out = _rounded(p * (absolute + 2 * move) + _flushed(p, q.dtype), p, k.shape[2], q.dtype) @ values.abs()
    lse = move.amax(-1) + min(absolute, _ARITHMETIC) * 4 if k.shape[2] else torch.zeros(q.shape[:3]).double()
    if k.shape[2]:
        lse = lse + min(absolute, _ARITHMETIC) * p.shape[-1] ** 0.5
    if q.dtype.itemsize == 2:  # torch's kernel for a CPU has a shorter exp for these
        lse = lse + 2e-4
    return out.masked_fill(unknown, math.inf), lse.masked_fill(unknown[..., 0], math.inf)


def gradient_error_bound(
    absolute: float,
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: str,
    window: tuple[int, int] | None,
    return_lse: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the changes of the gradients of q, k and v; inf where a number is not finite."""
    p, move, unknown, s = _moves(absolute, q, k, mask, scale, causal, window)
    g = grad_out.double().abs() if s.dead is None else torch.where(s.dead, 0.0, grad_out.double().abs())
    values = formulas.for_each_query_head(formulas.finite(v.double()), q).abs()
    size = g @ values.transpose(-2, -1)
    total = (p * size).sum(-1, keepdim=True)
    if return_lse:
        total = total + grad_lse.double().abs()[..., None]
    narrow = absolute if q.dtype.itemsize == 2 else 0.0  # the roundings of terms to 16 bits: of no common sign
    relative, flushed = min(absolute, _SUMS) + 2 * move, _flushed(p, q.dtype)
    terms, change = p * (size + total), (p * relative + flushed) * (size + total)
    heads, factor = k.shape[1], abs(formulas.scale_of(q, scale))
    signed = grad_out.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) @ formulas.for_each_query_head(
        formulas.finite(v.double()), q
    ).transpose(-2, -1)
    # out is rounded before the sums of rows are computed from it: by its size, not by theirs
    rounding, exact = (narrow * p * (signed.abs() + total)).square(), (narrow * p).square()
    # equal terms have equal roundings
    equal_rows = _most_equal(q, grad_out)
    of_keys = _SPREAD * (_most_equal(k, v) if narrow else 1) ** 0.5
    of_rows = _SPREAD * equal_rows**0.5
    of_queries = _SPREAD * _most_equal(q) ** 0.5  # have equal probabilities, whatever their gradients
    rows = rows_of_key = q.shape[2] * (q.shape[1] // max(k.shape[1], 1))
    rows = min(rows, 2 * (rows * equal_rows) ** 0.5)  # in effect: roundings of unequal terms have no common sign
    dq = _rounded(change, terms, k.shape[2], q.dtype) @ s.k.abs() + of_keys * _spread(rounding, s.k)
    ds = _rounded(change, terms, rows, q.dtype).transpose(-2, -1)
    dk = formulas.summed(ds @ s.q.abs(), heads)
    dk = dk + of_rows * _spread(rounding.transpose(-2, -1), s.q, heads)
    dv = formulas.summed(_rounded(p * relative + flushed, p, rows, q.dtype).transpose(-2, -1) @ g, heads)
    # torch's kernel for a CPU scales, and adds up blocks of 32 to 256 rows, in 16 bits: each time the sum so far, of
    # half of the blocks on average, is rounded
    of_blocks = 1 + (rows_of_key / _BLOCK / 2) ** 0.5
    blocks = _least(q.dtype) * (1 + rows_of_key / 32) / 2 if narrow else 0.0
    dv = dv + of_blocks * of_queries * _spread(exact.transpose(-2, -1), g, heads)
    # a row whose terms, or sums of them, may overflow: the terms may be scaled before they are summed, or after
    limit = torch.finfo(compute_dtype(q.dtype)).max / 2 / max(factor, 1.0)
    keys, queries = s.k.abs().clamp(min=1.0), s.q.abs().clamp(min=1.0)
    open_rows = ((terms @ keys) >= limit).any(-1, keepdim=True)
    open_keys = (formulas.summed(terms.transpose(-2, -1) @ queries, heads) >= limit).any(-1, keepdim=True)
    dq, dk = (dq * factor).masked_fill(open_rows, math.inf), (dk * factor).masked_fill(open_keys, math.inf)
    dk, dv = dk + blocks, dv + blocks
    seen = s.values if s.masked is None else s.values.masked_fill(s.masked, 0.0)
    given = all(bool(each.isfinite().all()) for each in (g, grad_lse, v, seen))
    anywhere = bool(unknown.any()) or not given
    if anywhere:  # what such a number reaches depends on the order of the products
        dq, dk, dv = (torch.full_like(each, math.inf) for each in (dq, dk, dv))
    # NaN is 0 * inf: a change that float64 cannot hold, of a number that is 0
    dq, dk, dv = (each.nan_to_num(nan=math.inf, posinf=math.inf) for each in (dq, dk, dv))
    return dq, dk, dv


def _spread(rounding: Tensor, other: Tensor, heads: int | None = None) -> Tensor:
    """Return the root of the sum of the squares of roundings times ``other``: the squares of roundings are given."""
    if not bool(rounding.any()):  # the square of a large float64 is inf
        return torch.zeros((), dtype=torch.float64)
    products = rounding @ other.square()
    return (products if heads is None else formulas.summed(products, heads)).sqrt()


def _most_equal(*tensors: Tensor) -> int:
    """Return the largest number of equal rows of tensors side by side, at least 1."""
    rows = torch.cat(tensors, -1).double()
    if not rows.numel():
        return 1
    # a sum by which equal rows are found, and, but by chance, no others
    sums = (rows * torch.linspace(1.0, 2.0, rows.shape[-1], dtype=torch.float64, device=rows.device).sqrt()).sum(-1)
    counts: Tensor = cast("Any", sums).unique(return_counts=True)[1]
    return int(counts.max())


def _flushed(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what probabilities lose where the smallest numbers of the arithmetic become 0."""
    return p.clamp(max=torch.finfo(compute_dtype(dtype)).smallest_normal)


def _least(dtype: torch.dtype) -> float:
    """Return by how much the smallest numbers of a dtype are off: those of bfloat16 are 0 in a processor's products."""
    info = torch.finfo(dtype)
    return info.smallest_normal * (1.0 if dtype is torch.bfloat16 else info.eps)


def _rounded(change: Tensor, terms: Tensor, count: float, dtype: torch.dtype) -> Tensor:
    """Return the change of terms that are rounded to ``dtype``, and of which ``count`` are added one by one."""
    least = _least(dtype)
    unit = torch.finfo(compute_dtype(dtype)).eps / 2
    return torch.where(terms > 0, change + terms * (0.5 * count * unit) + least, 0.0)


def _moves(
    absolute: float,
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: str,
    window: tuple[int, int] | None,
) -> tuple[Tensor, Tensor, Tensor, formulas.Scores]:
    """Return the probabilities, the change of each score, and the rows whose result is not determined: (..., 1)."""
    factor = formulas.scale_of(q, scale)
    s = formulas.scores(q.double(), k.double(), mask, factor, causal, window)
    p = formulas.probabilities(s)
    products = s.q.abs() @ s.k.abs().transpose(-2, -1)
    if s.masked is not None:
        products = products.masked_fill(s.masked, 0.0)
    size = products * abs(factor)
    # the largest score of a row is subtracted from the others
    move = min(absolute, _ARITHMETIC) * max(1.0, q.shape[-1] / _PRODUCTS) * size
    move = move + (move.amax(-1, keepdim=True) if size.shape[-1] else 0.0)
    largest = products * max(abs(factor), 1.0)  # they may be summed before they are scaled
    overflow = (largest >= torch.finfo(compute_dtype(q.dtype)).max / 2).any(-1, keepdim=True)
    # exp(move) - 1, where the first order is not enough
    return p, torch.expm1(move.clamp(max=80.0)), overflow | s.values.isnan().any(-1, keepdim=True), s

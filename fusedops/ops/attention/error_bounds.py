"""The error bounds of attention: the changes of the results where products and probabilities are rounded; and of two
parts of one.

A score is a sum of D products of exact inputs in float32: it moves by the rounding of the arithmetic, whatever the
dtype of the inputs. Probabilities and their gradients may be rounded to the dtype of the inputs before the next
product, as fused kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.evidence import finite_size
from fusedops.dtypes import STORAGE, arithmetic, compute_dtype, is_narrow
from fusedops.ops.attention import formulas
from fusedops.ops.attention.arguments import (
    AttentionArgs,
    AttentionGradArgs,
    PagedAttentionArgs,
    SelectKeysArgs,
    SparseAttentionArgs,
    SparseAttentionGradArgs,
    VarlenAttentionArgs,
    VarlenAttentionGradArgs,
)
from fusedops.ops.attention.merge_attention import MergeInputs, merge_inputs
from fusedops.ops.attention.paged_attention import dense
from fusedops.ops.attention.select_keys import hidden_of
from fusedops.ops.attention.sparse_attention import dense as dense_of_chosen
from fusedops.ops.attention.sparse_attention import dense_gradients

# of a score, in proportion to |q| @ |k|: float32 sums of up to 512 products in any order, and of more as much more
_ARITHMETIC, _PRODUCTS = 2e-6, 512
_SUMS = 2e-5  # of a gradient's term, in float32
_MAX_MOVE = 300.0  # of a score by rounding: exp() of it is beyond the largest float32, and finite in float64
_OF_TERM = 0.5  # of the change of a rounded term, in the sums for q and k


def error_bound(absolute: float, a: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Return the changes of out and lse; inf where a score may overflow."""
    p, move, unknown, _ = _moves(absolute, a.q, a.k, a.mask, a.scale, a.causal, a.window)
    values = formulas.for_each_query_head(formulas.finite(a.v.double()), a.q)
    out = _rounded(p * (absolute + 2 * move) + _flushed(p, a.q.dtype), p, a.k.shape[2], a.q.dtype) @ values.abs()
    lse = move.amax(-1) + min(absolute, _ARITHMETIC) * 4 if a.k.shape[2] else torch.zeros(a.q.shape[:3]).double()
    if a.k.shape[2]:
        lse = lse + min(absolute, _ARITHMETIC) * p.shape[-1] ** 0.5
    infinite = a.v.isinf()
    if infinite.any():  # a probability that is 0 in the arithmetic, times one, is NaN
        small = (p > 0) & (p <= torch.finfo(compute_dtype(a.q.dtype)).smallest_normal)
        reached = small.double() @ formulas.for_each_query_head(infinite.double(), a.q) > 0
        out = out.masked_fill(reached, math.inf)
    return out.masked_fill(unknown, math.inf), lse.masked_fill(unknown[..., 0], math.inf)


def gradient_error_bound(absolute: float, a: AttentionGradArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the changes of the gradients of q, k and v; inf where a number is not finite."""
    p, move, unknown, s = _moves(absolute, a.q, a.k, a.mask, a.scale, a.causal, a.window)
    g = a.grad_out.double().abs() if s.dead is None else torch.where(s.dead, 0.0, a.grad_out.double().abs())
    values = formulas.for_each_query_head(formulas.finite(a.v.double()), a.q).abs()
    size = g @ values.transpose(-2, -1)
    total = (p * size).sum(-1, keepdim=True)
    if a.return_lse:
        total = total + a.grad_lse.double().abs()[..., None]
    narrow = absolute if is_narrow(a.q.dtype) else 0.0  # the roundings of terms to 16 bits: of no common sign
    relative, flushed = min(absolute, _SUMS) + 2 * move, _flushed(p, a.q.dtype)
    terms, change = p * (size + total), (p * relative + flushed) * (size + total)
    heads, factor = a.k.shape[1], abs(formulas.scale_of(a.q, a.scale))
    g_signed = a.grad_out.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    v_signed = formulas.for_each_query_head(formulas.finite(a.v.double()), a.q)
    signed = g_signed @ v_signed.transpose(-2, -1)
    inner = (p * signed).sum(-1, keepdim=True).abs()
    if a.return_lse:
        inner = inner + a.grad_lse.double().abs()[..., None]
    exact = (narrow * p).square()
    # the sum of a row is computed from out, or from probabilities, which were rounded: in all terms of the row alike
    of_sums = torch.zeros_like(inner)
    if narrow:
        squares = (p.square() * (g_signed.square() @ v_signed.square().transpose(-2, -1))).sum(-1, keepdim=True)
        of_out = (g_signed * formulas.finite(a.out.double())).square().sum(-1, keepdim=True)
        of_sums = inner.square() + squares + of_out
    rounding = exact * (signed.abs() + inner).square()
    # equal terms have equal roundings
    equal_rows = _most_equal(a.q, a.grad_out)
    of_keys = (_most_equal(a.k, a.v) if narrow else 1) ** 0.5
    of_rows = equal_rows**0.5
    of_queries = _most_equal(a.q) ** 0.5  # have equal probabilities, whatever their gradients
    rows = a.q.shape[2] * (a.q.shape[1] // max(a.k.shape[1], 1))
    rows = min(rows, 2 * (rows * equal_rows) ** 0.5)  # in effect: roundings of unequal terms have no common sign
    dq = _rounded(change, terms, a.k.shape[2], a.q.dtype) @ s.k.abs()
    dq = dq + _OF_TERM * (of_keys * _spread(rounding, s.k) + narrow * of_sums.sqrt() * (p @ s.k).abs())
    ds = _rounded(change, terms, rows, a.q.dtype).transpose(-2, -1)
    dk = formulas.summed(ds @ s.q.abs(), heads)
    dk = dk + _OF_TERM * of_rows * _spread((rounding + exact * of_sums).transpose(-2, -1), s.q, heads)
    dv = formulas.summed(_rounded(p * relative + flushed, p, rows, a.q.dtype).transpose(-2, -1) @ g, heads)
    dv = dv + of_queries * _spread(exact.transpose(-2, -1), g, heads)
    # a row whose terms, or sums of them, may overflow: the terms may be scaled before they are summed, or after
    limit = torch.finfo(compute_dtype(a.q.dtype)).max / 2 / max(factor, 1.0)
    keys, queries = s.k.abs().clamp(min=1.0), s.q.abs().clamp(min=1.0)
    open_rows = ((terms @ keys) >= limit).any(-1, keepdim=True)
    open_keys = (formulas.summed(terms.transpose(-2, -1) @ queries, heads) >= limit).any(-1, keepdim=True)
    # a term may be scaled before it is rounded to 16 bits
    least = (terms > 0).double() * (STORAGE[a.q.dtype].smallest_step * max(1.0 - factor, 0.0))
    dq = dq * factor + least @ s.k.abs()
    dk = dk * factor + formulas.summed(least.transpose(-2, -1) @ s.q.abs(), heads)
    dq, dk = dq.masked_fill(open_rows, math.inf), dk.masked_fill(open_keys, math.inf)
    seen = s.values if s.masked is None else s.values.masked_fill(s.masked, 0.0)
    given = all(bool(each.isfinite().all()) for each in (g, a.grad_lse, a.v, seen))
    anywhere = bool(unknown.any()) or not given
    if anywhere:  # what such a number reaches depends on the order of the products
        dq, dk, dv = (torch.full_like(each, math.inf) for each in (dq, dk, dv))
    # NaN is 0 * inf: a change that float64 cannot hold, of a number that is 0
    # and beyond the arithmetic's largest number is what exp(score - lse) may overflow to, with another kernel's lse
    most = torch.finfo(compute_dtype(a.q.dtype)).max
    dq, dk, dv = (
        each.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(each > most, math.inf) for each in (dq, dk, dv)
    )
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


def _rounded(change: Tensor, terms: Tensor, count: float, dtype: torch.dtype) -> Tensor:
    """Return the change of terms that are rounded to ``dtype``, and of which ``count`` are added one by one."""
    least = STORAGE[dtype].smallest_step
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
    return p, torch.expm1(move.clamp(max=_MAX_MOVE)), overflow | s.values.isnan().any(-1, keepdim=True), s


# ----------------------------------------------------------------------------------------------------- merge_attention


def merge_error_bound(
    absolute: float, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the changes of out and lse: a weight, exp of a difference, changes by the roundings of both lse."""
    p, size_a, size_b, relative = _merged(absolute, out_a, lse_a, out_b, lse_b)
    of_out = relative[..., None] * (p.weight_a[..., None] * size_a + p.weight_b[..., None] * size_b)
    of_out = of_out + _flushed_weights(out_a, lse_a, out_b, lse_b) * (size_a + size_b)
    unknown = ~(p.a.isfinite() & p.b.isfinite()) & _may_flush(p)[..., None]  # 0 * inf, or a small number times inf
    of_lse = absolute * (1 + p.lse.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
    return of_out.masked_fill(unknown, math.inf), of_lse


def merge_gradient_error_bound(
    absolute: float,
    grad_out: Tensor,
    grad_lse: Tensor,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the changes of the four gradients; inf where a sum may overflow."""
    p, size_a, size_b, relative = _merged(absolute, out_a, lse_a, out_b, lse_b)
    g, g_lse = (each.double().abs().nan_to_num(nan=0.0, posinf=0.0) for each in (grad_out, grad_lse))
    flushed = _flushed_weights(out_a, lse_a, out_b, lse_b)
    terms = (g * (size_a + size_b)).sum(-1)
    sums = relative * max(1.0, out_a.shape[-1] / _PRODUCTS)  # sums of more products are less exact
    both = p.weight_a * p.weight_b + flushed
    dlse_a = sums * (p.weight_a * g_lse + both * terms) + flushed * (g_lse + terms)
    dlse_b = sums * (p.weight_b * g_lse + both * terms) + flushed * (g_lse + terms)
    dout_a, dout_b = ((relative * each)[..., None] * g + flushed * g for each in (p.weight_a, p.weight_b))
    limit = torch.finfo(arithmetic(out_a, lse_a, out_b, lse_b)).max / 2
    given = (grad_out.isfinite() & p.a.isfinite() & p.b.isfinite()).all(-1) & grad_lse.isfinite()
    # the sum is that of a difference, or the difference that of two sums
    unknown = (terms >= limit) | ~given
    unknown_out = _may_flush(p)[..., None] & ~grad_out.isfinite()
    return (
        dout_a.masked_fill(unknown_out, math.inf),
        dlse_a.masked_fill(unknown, math.inf),
        dout_b.masked_fill(unknown_out, math.inf),
        dlse_b.masked_fill(unknown, math.inf),
    )


def _merged(
    absolute: float, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[MergeInputs, Tensor, Tensor, Tensor]:
    """Return the parts in float64, the magnitudes of both out, and the relative change of a weight, (...)."""
    p = merge_inputs(out_a.double(), lse_a.double(), out_b.double(), lse_b.double())
    size_a, size_b = (each.abs().nan_to_num(nan=0.0, posinf=0.0) for each in (p.a, p.b))
    sizes = [each.double().abs().nan_to_num(nan=0.0, posinf=0.0) for each in (lse_a, lse_b)]
    weights = [each.nan_to_num(nan=0.0) for each in (p.weight_a, p.weight_b)]
    return p._replace(weight_a=weights[0], weight_b=weights[1]), size_a, size_b, absolute * (1 + sizes[0] + sizes[1])


def _flushed_weights(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> float:
    """Return what a weight loses where the smallest numbers of the arithmetic become 0."""
    return torch.finfo(arithmetic(out_a, lse_a, out_b, lse_b)).smallest_normal


def _may_flush(p: MergeInputs) -> Tensor:
    """Return the rows in which the smaller weight, of a part with keys, may be 0: (...)."""
    smaller = torch.minimum(p.weight_a, p.weight_b)
    return (smaller < 2 * torch.finfo(torch.float32).smallest_normal) & ~(p.none_a | p.none_b)


# ----------------------------------------------------------------------------------------------------- varlen_attention


def packed_error_bound(absolute: float, a: VarlenAttentionArgs) -> tuple[Tensor, Tensor]:
    """Return the changes of out and lse, of attention in which other sequences are masked."""
    mask = formulas.packed_mask(a.cu_seqlens_q, a.q.shape[0], a.cu_seqlens_k, a.k.shape[0], a.causal, a.window)
    first, second, third = map(formulas.heads_first, (a.q, a.k, a.v))
    call = AttentionArgs(first, second, third, mask, a.scale, "none", None, a.return_lse)
    out, lse = error_bound(absolute, call)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def paged_error_bound(absolute: float, a: PagedAttentionArgs) -> tuple[Tensor, Tensor]:
    """Return the changes of out and lse, of attention to the keys in the order of the sequences."""
    return packed_error_bound(absolute, dense(a))


def sparse_error_bound(absolute: float, a: SparseAttentionArgs) -> tuple[Tensor, Tensor]:
    """Return the changes of out and lse, of attention in which the other keys are masked."""
    return error_bound(absolute, dense_of_chosen(a))


def sparse_gradient_error_bound(absolute: float, a: SparseAttentionGradArgs) -> tuple[Tensor, ...]:
    """Return the changes of the gradients of q, k and v, of the same."""
    return gradient_error_bound(absolute, dense_gradients(a))


def packed_gradient_error_bound(absolute: float, a: VarlenAttentionGradArgs) -> tuple[Tensor, ...]:
    """Return the changes of the gradients of q, k and v, of attention in which other sequences are masked."""
    mask = formulas.packed_mask(a.cu_seqlens_q, a.q.shape[0], a.cu_seqlens_k, a.k.shape[0], a.causal, a.window)
    of_lse = [each.transpose(0, 1)[None] for each in (a.grad_lse, a.lse)]
    grad, first, second, third, result = map(formulas.heads_first, (a.grad_out, a.q, a.k, a.v, a.out))
    options = a.scale, "none", None, a.return_lse, a.needs
    call = AttentionGradArgs(grad, of_lse[0], first, second, third, mask, result, of_lse[1], *options)
    bounds = gradient_error_bound(absolute, call)
    return tuple(each[0].transpose(0, 1) if each.dim() == 4 else each for each in bounds)


# --------------------------------------------------------------------------------------------------------- select_keys


def pin_choice(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the arguments of a call with all but the keys that a kernel chose hidden, where it may choose so.

    Where it may not, the row has the choice of float64: the index is then found to differ.

    Args:
        args: every argument, on the CPU.
        outputs: the index of the kernel, on the CPU.
    """
    a, (index,) = SelectKeysArgs(*args), outputs
    batch, queries, keys = *a.q.shape[:2], a.k.shape[1]
    if index.shape != (batch, queries, a.count) or not index.numel() or not keys:
        return tuple(args)
    hidden = hidden_of(a)
    visible = torch.ones(batch, queries, keys, dtype=torch.bool)
    visible = visible if hidden is None else visible & ~hidden
    column = torch.where((index < 0) | (index >= keys), keys, index).long()
    chosen = torch.zeros(batch, queries, keys + 1, dtype=torch.bool).scatter(-1, column, True)[..., :keys]
    count = visible.sum(-1).clamp(max=a.count)
    right = (chosen.sum(-1) == count) & ~(chosen & ~visible).any(-1) & _may_choose(a, visible, chosen)
    return (*args[:-1], torch.where(right[..., None], ~chosen, ~visible))


def _may_choose(a: SelectKeysArgs, visible: Tensor, chosen: Tensor) -> Tensor:
    """Return True for each query (B, S) of which no other visible key surely comes before one that is chosen."""
    value, error = _scores(a)
    others = visible & ~chosen
    best = torch.where(others, value - error, -math.inf).amax(-1)
    worst = torch.where(chosen, value + error, math.inf).amin(-1)
    # scores that every kernel has bit by bit: of two equal ones the lower index comes first
    exact = error == 0
    tied = torch.where(others & exact, value, -math.inf).amax(-1, keepdim=True)
    number = torch.arange(value.shape[-1])
    first = torch.where(others & exact & (value == tied), number, value.shape[-1]).amin(-1)
    last = torch.where(chosen & exact & (value == tied), number, -1).amax(-1)
    return (best <= worst) & (first > last)


def _scores(a: SelectKeysArgs) -> tuple[Tensor, Tensor]:
    """Return the scores in float64, (B, S, T), NaN as inf, and by how much those of a kernel may differ."""
    dtype = arithmetic(a.q, a.weights)
    info = torch.finfo(dtype)
    relative = max(_ARITHMETIC * info.eps / torch.finfo(torch.float32).eps, info.eps) * max(1.0, a.q.shape[-1] / 512)
    q, k, weights = a.q.double(), a.k.double(), a.weights.double()
    shape = (*a.q.shape[:2], a.k.shape[1])
    value, error, sizes = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    unknown = torch.zeros(shape, dtype=torch.bool)
    for head in range(q.shape[2]):
        one, weight = q[:, :, head], weights[..., head, None]
        x = a.scale * (one @ k.mT)
        products = finite_size(one) @ finite_size(k).mT
        move = relative * abs(a.scale) * products + torch.where(products > 0, info.smallest_normal, 0.0)
        positive = ~(x + move <= 0)
        term = weight * torch.relu(x)
        size = finite_size(term)
        value = value + term
        sizes = sizes + size
        error = error + torch.where(positive, finite_size(weight) * move + info.smallest_normal, 0.0)
        unknown |= (products * max(abs(a.scale), 1.0) >= info.max / 2) | (size >= info.max / 4)
    error = error + info.eps * (q.shape[2] + 2) * sizes
    error = torch.where(value.isfinite(), error, 0.0).masked_fill(unknown, math.inf)
    most = torch.finfo(torch.float64).max
    value = value.masked_fill(value == math.inf, most).masked_fill(value == -math.inf, -most)
    return value.nan_to_num(nan=math.inf, posinf=most, neginf=-most), error

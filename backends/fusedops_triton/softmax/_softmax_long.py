"""Softmax of rows that do not fit on chip: a program reads its row twice, in blocks. ``_softmax.py`` has the launchers.

One read would need the row in the registers or the shared memory of a multiprocessor, 256 and 227 KB, with room for the
rest, or several multiprocessors for a row, whose sums Triton does not exchange. ``evict_last`` keeps a row in the L2
cache for the second pass: what all programs have in flight, 3 or 4 for each multiprocessor, may not fit in there, and
then a forward takes 3 accesses an element in place of 2, a backward 5 in place of 3.

The first pass computes the maximum and the sum (Milakov and Gimelshein 2018, "Online normalizer calculation for
softmax"), the second one writes the result.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportUnnecessaryComparison=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.
from __future__ import annotations

import triton
import triton.language as tl

from fusedops_triton._jit._common import exp, read_evicting, scalar, widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.softmax._softmax_rows import offset, or_nan, or_zero, place, sector_end

#: Arguments that do not change the generated code: each would double the compilations.
NOT_SPECIALIZED = [
    "scale", "stride_xb", "stride_xh", "stride_xq", "stride_mb", "stride_mh", "stride_mq",
    "n_rows", "size_h", "size_q", "size_k",
]  # fmt: skip
NOT_SPECIALIZED_BACKWARD = [
    "scale", "stride_gb", "stride_gh", "stride_gq", "n_rows", "size_h", "size_q", "size_k",
]  # fmt: skip


@profiled(do_not_specialize=NOT_SPECIALIZED)
def forward_long(
    y_ptr, x_ptr, mask_ptr, scale,
    stride_xb, stride_xh, stride_xq, stride_mb, stride_mh, stride_mq, n_rows, size_h, size_q, size_k,
    CAUSAL: tl.constexpr, HEADS_INNER: tl.constexpr, UNIT: tl.constexpr, UNIT_X: tl.constexpr, UNIT_M: tl.constexpr,
    STEP_X: tl.constexpr, STEP_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one row of any length, BLOCK_K columns at a time. Grid (n_rows,). Arguments as in _forward_on_chip."""
    store_row(
        tl.program_id(0).to(n_rows.dtype), y_ptr, x_ptr, mask_ptr, scale,
        stride_xb, stride_xh, stride_xq, stride_mb, stride_mh, stride_mq, size_h, size_q, size_k,
        CAUSAL, HEADS_INNER, UNIT, UNIT_X, UNIT_M, STEP_X, STEP_M, None, BLOCK_K,
    )  # fmt: skip


@profiled(do_not_specialize=NOT_SPECIALIZED_BACKWARD)
def backward_long(
    dx_ptr, grad_ptr, y_ptr, scale, stride_gb, stride_gh, stride_gq, n_rows, size_h, size_q, size_k,
    CAUSAL: tl.constexpr, UNIT: tl.constexpr, UNIT_G: tl.constexpr, STEP_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one row of the gradient, BLOCK_K columns at a time. Grid (n_rows,). Arguments as in _backward_on_chip."""
    row = tl.program_id(0).to(n_rows.dtype)
    b, h, q = place(row, size_h, size_q, False)
    columns = size_k.to(tl.int32) * UNIT
    g_row = grad_ptr + offset(b, h, q, stride_gb, stride_gh, stride_gq, UNIT_G)
    y_row = y_ptr + row.to(tl.int64) * columns
    dx_row = dx_ptr + row.to(tl.int64) * columns
    factor = scalar(scale)
    stop, reach = columns, columns
    if CAUSAL:
        stop = tl.minimum(columns, q + 1).to(tl.int32)
        reach = sector_end(q, y_ptr)

    # each lane keeps its sum until the end: one reduction per row instead of one per block
    sums = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in range(0, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < columns) & (k < reach)
        g = read_evicting(g_row + k * STEP_G, inside, "evict_last")
        y = read_evicting(y_row + k, inside, "evict_last")
        sums += tl.where(k < stop, g * y, 0.0)
    total = tl.sum(sums, axis=0)

    for start in range(0, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < columns) & (k < reach)
        g = read_evicting(g_row + k * STEP_G, inside, "evict_first")
        y = read_evicting(y_row + k, inside, "evict_first")
        dx = tl.where(k < stop, factor * y * (g - total), 0.0)
        tl.store(dx_row + k, dx.to(dx_ptr.dtype.element_ty), mask=k < columns)
    if CAUSAL:
        _store_zeros(dx_row, tl.cdiv(stop, BLOCK_K) * BLOCK_K, columns, BLOCK_K)


@triton.jit
def _store_zeros(row_ptr, start, size_k, BLOCK_K: tl.constexpr):
    """Store zeros in a row from column ``start``: the blocks that are entirely above the diagonal."""
    for first in range(start, size_k, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        tl.store(row_ptr + k, tl.zeros([BLOCK_K], dtype=row_ptr.dtype.element_ty), mask=k < size_k)


@triton.jit
def store_row(
    row, y_ptr, x_ptr, mask_ptr, scale,
    stride_xb, stride_xh, stride_xq, stride_mb, stride_mh, stride_mq, size_h, size_q, size_k,
    CAUSAL: tl.constexpr, HEADS_INNER: tl.constexpr, UNIT: tl.constexpr, UNIT_X: tl.constexpr, UNIT_M: tl.constexpr,
    STEP_X: tl.constexpr, STEP_M: tl.constexpr, MOST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute one row with any scores, BLOCK_K columns at a time. Masked positions are 0 even if the row is NaN.

    MOST: a limit of its columns, or None. Other arguments as in _forward_on_chip.
    """
    b, h, q = place(row, size_h, size_q, HEADS_INNER)
    columns = size_k.to(tl.int32) * UNIT
    x_row = x_ptr + offset(b, h, q, stride_xb, stride_xh, stride_xq, UNIT_X)
    y_row = y_ptr + ((b * size_h + h).to(tl.int64) * size_q + q) * columns
    stop, reach = columns, columns
    if CAUSAL:
        stop = tl.minimum(columns, q + 1).to(tl.int32)
        reach = tl.minimum(columns, sector_end(q, x_ptr)).to(tl.int32)
    limit = stop if MOST is None else MOST

    # `total` is the sum of exp(score - top), `top` the maximum so far. The sum is rescaled when the maximum changes.
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, limit, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        keep = k < stop
        x = tl.load(x_row + k * STEP_X, mask=k < reach, other=0.0, eviction_policy="evict_last")
        if mask_ptr is not None:
            m_row = mask_ptr + offset(b, h, q, stride_mb, stride_mh, stride_mq, UNIT_M)
            keep = keep & (tl.load(m_row + k * STEP_M, mask=k < reach, other=1) == 0)
        score = tl.where(keep, widened(x) * scalar(scale), float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=0))
        total = total * exp(top - or_zero(higher)) + tl.sum(exp(score - or_zero(higher)), axis=0)
        top = higher

    inverse = 1.0 / or_nan(total)
    for start in range(0, limit, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        keep = k < stop
        x = tl.load(x_row + k * STEP_X, mask=k < reach, other=0.0, eviction_policy="evict_first")
        if mask_ptr is not None:
            m_row = mask_ptr + offset(b, h, q, stride_mb, stride_mh, stride_mq, UNIT_M)
            keep = keep & (tl.load(m_row + k * STEP_M, mask=k < reach, other=1) == 0)
        score = tl.where(keep, widened(x) * scalar(scale), float("-inf"))
        y = tl.where(keep, exp(score - or_zero(top)) * inverse, 0.0)
        tl.store(y_row + k, y.to(y_ptr.dtype.element_ty), mask=k < columns)
    if CAUSAL:
        _store_zeros(y_row, tl.cdiv(limit, BLOCK_K) * BLOCK_K, columns, BLOCK_K)

"""The rows of softmax: where they are, which columns are read, and what exponentials are subtracted and divided by."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(row, size_h, size_q, HEADS_INNER: tl.constexpr):
    """Return b, h, q of a row. q varies fastest, or h if HEADS_INNER."""
    # one division after the other: the product of the sizes may need more than 32 bits
    if HEADS_INNER:
        h, rest = row % size_h, row // size_h
        return rest // size_q, h, rest % size_q
    q, rest = row % size_q, row // size_q
    return rest // size_h, rest % size_h, q


@triton.jit
def place_rows(first, size_h, size_q, HEADS_INNER: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr):
    """Return b, h, q of ROWS rows from ``first``. TOGETHER: ROWS divides size_q, so b and h are one number each."""
    if TOGETHER:
        b, h, q = place(first, size_h, size_q, HEADS_INNER)
        q += tl.arange(0, ROWS)
    else:
        b, h, q = place(first + tl.arange(0, ROWS), size_h, size_q, HEADS_INNER)
    return b, h, q


@triton.jit
def offset(b, h, q, stride_b, stride_h, stride_q, UNIT: tl.constexpr):
    """Return the offset of a row in elements, 64-bit. The strides are in units of UNIT."""
    return (b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + q.to(tl.int64) * stride_q) * UNIT


@triton.jit
def sector_end(q, ptr):
    """Return the first column behind the 32-byte sector that contains column q, if the row starts on a sector."""
    SECTOR: tl.constexpr = 256 // ptr.dtype.element_ty.primitive_bitwidth
    return (q // SECTOR + 1) * SECTOR


@triton.jit
def or_zero(top):
    """Return the maximum to subtract: 0 if all scores are -inf, so that exp gives 0 and not exp(-inf + inf) = NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def or_nan(total):
    """Return the sum to divide by: NaN if all scores are -inf. As in torch, the row is NaN where it is not masked."""
    return tl.where(total == 0.0, float("nan"), total)

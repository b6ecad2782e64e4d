"""Softmax of rows of two-byte elements that fit on chip as pairs: 32 to 64 thousand columns, backward 16 to 32.

A register of 32 bits holds two elements until they are used; with an element in each, as in ``_softmax.py``, 1024
threads of 64 registers hold half as many. A program loads its row once, as the kernels for longer rows do not: a second
read comes from the L2 cache at best. ``_softmax.py`` has the launchers, which use these kernels for contiguous, aligned
tensors without a mask and without ``causal``.

Float32 rows of these widths, and two-byte rows of twice the width, have 256 KB: all registers of a multiprocessor, and
more than its 227 KB of shared memory. They are read twice.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.
from __future__ import annotations

import triton
import triton.language as tl

from fusedops_triton._jit._profiled import profiled
from fusedops_triton.softmax._softmax_long import store_row
from fusedops_triton.softmax._softmax_rows import or_zero

# Each pass converts the pairs anew. The compiler would convert once and keep the results, which do not fit in the
# registers; so the pairs of a pass depend on the sum of the pass before (``_after``). Blocks of 16 bytes a thread, one
# after the other, keep the values that are alive few.


@profiled(do_not_specialize=["scale", "n_rows", "size_k"])
def forward_packed(
    y_ptr, x_ptr, scale, n_rows, size_k, UNIT: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Compute one row. Grid (n_rows,); Sk = size_k * UNIT <= PARTS * 2 * PAIRS.

    y_ptr, x_ptr: (n_rows, Sk) contiguous, float16 or bfloat16, multiples of 16 bytes. scale: float32.
    """
    row = tl.program_id(0).to(n_rows.dtype)
    columns = size_k.to(tl.int32) * UNIT
    at = row.to(tl.int64) * columns
    factor = scale * 1.4426950408889634  # in units of log2(e), so that exp2 does not multiply
    # of columns that do not exist: their score is -inf. With a scale of 0 it is NaN, and the row takes the other way
    infinite = tl.where(scale < 0.0, float("inf"), float("-inf")).to(x_ptr.dtype.element_ty)
    absent = infinite.to(tl.uint16, bitcast=True).to(tl.uint32) * 65537

    loaded = ()
    for i in tl.static_range(PARTS):
        loaded = loaded + (_pairs(x_ptr + at, i, columns, absent, PAIRS),)  # noqa: RUF005 - Triton has no unpacking
    tops = tl.full([PAIRS], float("-inf"), tl.float32)
    for i in tl.static_range(PARTS):
        low, high = _elements(loaded[i], x_ptr.dtype.element_ty)
        tops = tl.maximum(tops, tl.maximum(low * factor, high * factor))
    top = or_zero(tl.max(tops, axis=0))
    sums = tl.zeros([PAIRS], tl.float32)
    for i in tl.static_range(PARTS):
        low, high = _elements(loaded[i] ^ _after(top), x_ptr.dtype.element_ty)
        sums += tl.exp2(low * factor - top) + tl.exp2(high * factor - top)
    total = tl.sum(sums, axis=0)
    if total > 0.0:
        inverse = 1.0 / total
        for i in tl.static_range(PARTS):
            low, high = _elements(loaded[i] ^ _after(inverse), x_ptr.dtype.element_ty)
            low, high = tl.exp2(low * factor - top) * inverse, tl.exp2(high * factor - top) * inverse
            _store(y_ptr + at, i, columns, low, high, PAIRS)
    else:  # infinities, NaN, scores that log2(e) makes infinite, or a scale of 0
        store_row(
            row, y_ptr, x_ptr, None, scale, 0, 0, size_k, 0, 0, 0, 1, n_rows, size_k,
            False, False, UNIT, UNIT, 1, 1, 0, None, PAIRS,
        )  # fmt: skip


@profiled(do_not_specialize=["scale", "n_rows", "size_k"])
def backward_packed(
    dx_ptr, grad_ptr, y_ptr, scale, n_rows, size_k, UNIT: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Compute one row of the gradient. Grid (n_rows,). Arguments as in forward_packed."""
    columns = size_k.to(tl.int32) * UNIT
    at = tl.program_id(0).to(n_rows.dtype).to(tl.int64) * columns
    absent = tl.full([], 0, tl.uint32)
    grads, ys = (), ()
    for i in tl.static_range(PARTS):
        grads = grads + (_pairs(grad_ptr + at, i, columns, absent, PAIRS),)  # noqa: RUF005
        ys = ys + (_pairs(y_ptr + at, i, columns, absent, PAIRS),)  # noqa: RUF005
    sums = tl.zeros([PAIRS], tl.float32)
    for i in tl.static_range(PARTS):
        low_g, high_g = _elements(grads[i], grad_ptr.dtype.element_ty)
        low_y, high_y = _elements(ys[i], y_ptr.dtype.element_ty)
        sums += low_g * low_y + high_g * high_y
    total = tl.sum(sums, axis=0)
    for i in tl.static_range(PARTS):
        low_g, high_g = _elements(grads[i] ^ _after(total), grad_ptr.dtype.element_ty)
        low_y, high_y = _elements(ys[i] ^ _after(total), y_ptr.dtype.element_ty)
        low, high = scale * low_y * (low_g - total), scale * high_y * (high_g - total)
        _store(dx_ptr + at, i, columns, low, high, PAIRS)


@triton.jit
def _pairs(row_ptr, part, columns, absent, PAIRS: tl.constexpr):
    """Load a part of a row, two elements in each uint32; ``absent`` behind the last column."""
    k = part * PAIRS + tl.arange(0, PAIRS)
    return tl.load(row_ptr.to(tl.pointer_type(tl.uint32)) + k, mask=k < columns // 2, other=absent)


@triton.jit
def _elements(pairs, TYPE: tl.constexpr):
    """Return the first and the second element of pairs in float32."""
    if TYPE == tl.bfloat16:  # noqa: SIM300 - ruff takes any upper case name for a constant
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        low = pairs.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _after(value):
    """Return a number that is 0 unless ``value`` is NaN. The compiler has to compute ``value`` before."""
    return tl.where(value == value, 0, 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _store(row_ptr, part, columns, low, high, PAIRS: tl.constexpr):
    """Store a part of a row."""
    k = part * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)
    tl.store(row_ptr + k, tl.interleave(low, high).to(row_ptr.dtype.element_ty), mask=k < columns)

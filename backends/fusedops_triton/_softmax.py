"""Scaled masked softmax in Triton: two launchers, and the four kernels that they choose from.

A tensor is seen as (B, H, Sq, Sk): ranks below four have leading sizes of 1, above four the leading dimensions are
joined. Work goes by rows, one row being the Sk scores of one query.

    rows on chip    a program loads whole rows, once: 2 accesses an element forward, 3 backward, the fewest there are.
                    Short rows go several to a program of one warp, so that no row waits for a barrier.
    longer rows     a program walks its row twice, in blocks: first for the maximum and the sum (Milakov and
                    Gimelshein 2018, "Online normalizer calculation for softmax"), then to write.

What holds for all of them:

- Scores, sums and exponentials are in float32, in float64 for float64. `scale` is never rounded to a narrower dtype.
- `x`, `grad` and `mask` are read where they lie, through their own strides (0 where broadcast), if their last stride is
  0 or 1. Otherwise they are made contiguous first: every lane would fetch a 32-byte sector for one element.
- With `causal`, reads end with the 32-byte sector that holds the diagonal: memory moves no smaller piece, and a bound
  that is no multiple of 16 bytes would make every access of the row a scalar one. What that last sector holds behind
  the diagonal is loaded and dropped before it is used, so a NaN there goes nowhere.
- Offsets of rows are 64-bit: b*h*sq*sk passes 2**31 in ordinary use. Within a row they are 32-bit.
- No atomics: the same input gives the same bits.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false
# Triton is not typed, and the body of a jit function is a language of its own that only looks like Python.

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops_triton._launch import OPTIONS, on_device_of, power_of_two, scalar_for, warps_for

# ---------------------------------------------------------------------------------------------------------- launchers


class _Plan(NamedTuple):
    """How rows of one width are shared out among programs."""

    rows: int  # rows of a program
    block: int  # columns that it holds at a time
    warps: int
    on_chip: bool  # a whole row at once


#: Elements in each thread, by element size. 32 two-byte elements are four 16-byte loads in flight: with 1024 threads
#: 64 KB for a multiprocessor, where 3.3 TB/s times 600 ns of latency is 15 KB for each of an H100's 132. As float32
#: they take 32 of the 64 registers that a thread has when there are 1024. Doubles take two registers each.
_EACH = {2: 32, 4: 32, 8: 16}

#: Elements of a program that holds several short rows: one warp of them. And rows: each has 64-bit offsets in registers
#: (1024 rows of one column took all 255 and spilled).
_SHORT_TILE = 1024
_SHORT_ROWS = 128

#: The widest row on chip, by element size. At twice the width 1024 threads, 64 registers each, spill 48 to 520 bytes a
#: thread on sm_90 (tests/test_triton_compile.py). Backward holds two inputs where forward holds one.
_FORWARD_ON_CHIP = {2: 32768, 4: 32768, 8: 16384}
_BACKWARD_ON_CHIP = {2: 16384, 4: 16384, 8: 8192}

#: Elements that a program of the kernels for longer rows has in flight, by element size: half of what a program on chip
#: holds with as many threads, so that two share a multiprocessor and one computes while the other waits.
_LONG_TILE = {2: 8192, 4: 8192, 8: 4096}


@lru_cache(maxsize=1024)  # 0.1 us instead of 1.5
def plan(size_k: int, element_size: int, inputs: int) -> _Plan:
    """How to cover rows of ``size_k`` elements, of ``inputs`` tensors at once (forward 1, backward 2)."""
    width = power_of_two(size_k)
    each = _EACH[element_size]
    if width > (_FORWARD_ON_CHIP if inputs == 1 else _BACKWARD_ON_CHIP)[element_size]:
        tile = _LONG_TILE[element_size]
        return _Plan(1, tile // inputs, warps_for(tile, each // 2), False)
    rows = min(max(1, _SHORT_TILE // width), _SHORT_ROWS)
    return _Plan(rows, width, warps_for(rows * width, each), True)


def softmax_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """``softmax(where(masked, -inf, scale * x), dim=-1)``; masked positions, and rows with nothing else, exactly 0.

    Args:
        x: (..., Sq, Sk), rank >= 2, float16, bfloat16, float32 or float64, any strides.
        mask: bool or uint8, broadcastable to x, any strides; non-zero is masked. Or None.
        scale: finite.
        causal: also mask k > q.

    Returns:
        (..., Sq, Sk), contiguous, dtype of x.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    x, x_strides = _readable(x, x.shape)
    mask_strides = (0, 0, 0, 0)
    if mask is not None:  # bool and uint8 both hold one byte, and any but zero masks: one kernel for the two
        mask, mask_strides = _readable(mask.view(torch.uint8), y.shape)
    size_h, size_q, size_k = _inner_sizes(y)
    n_rows = y.numel() // size_k
    rows, block, warps, on_chip = plan(size_k, y.element_size(), inputs=1)
    # Heads that share a mask run one after the other for each query, so that its row, read from memory by the first, is
    # in the L2 cache for the rest. Else the whole [sq, sk] mask would have to stay there while a head of x passes
    # through: 84 MB at 4096 * 4096 in bfloat16, an H100 has 50. Rows that go several to a program keep their order:
    # with them a head is small enough. (A loop over heads inside a program would spare L2 a quarter of its traffic,
    # which is not what binds, and would leave [1, 1, sq, sk] short of programs.)
    heads_inner = size_h > 1 and rows == 1 and mask_strides[1] == 0 and mask_strides[2] != 0
    kernel = _forward_on_chip if on_chip else _forward_long
    with on_device_of(y):
        kernel[(-(-n_rows // rows),)](
            y, x, mask, scalar_for(scale, y.dtype), *x_strides, *mask_strides, n_rows, size_h, size_q, size_k,
            CAUSAL=causal, HEADS_INNER=heads_inner, ROWS=rows, BLOCK_K=block, WIDE=_wide(y.dtype),
            num_warps=warps, **OPTIONS,
        )  # fmt: skip
    return y


def softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """``scale * y * (grad - sum(grad * y, -1))``, the gradient of ``softmax_forward``.

    Args:
        grad: (..., Sq, Sk), the gradient of y, dtype of y, any strides.
        y: (..., Sq, Sk), what forward returned. It is 0 where masked, so no mask is needed.
        scale: as forward had it.
        causal: as forward had it; grad and y are then not used where k > q.

    Returns:
        (..., Sq, Sk), contiguous, dtype of y.
    """
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    if dx.numel() == 0:
        return dx
    y = y.contiguous()  # as forward made it; a y from elsewhere may lie otherwise
    grad, grad_strides = _readable(grad, y.shape)
    size_h, size_q, size_k = _inner_sizes(y)
    n_rows = y.numel() // size_k
    rows, block, warps, on_chip = plan(size_k, y.element_size(), inputs=2)
    kernel = _backward_on_chip if on_chip else _backward_long
    with on_device_of(y):
        kernel[(-(-n_rows // rows),)](
            dx, grad, y, scalar_for(scale, y.dtype), *grad_strides, n_rows, size_h, size_q, size_k,
            CAUSAL=causal, ROWS=rows, BLOCK_K=block, WIDE=_wide(y.dtype),
            num_warps=warps, **OPTIONS,
        )  # fmt: skip
    return dx


def _wide(dtype: torch.dtype) -> tl.dtype:
    """The dtype of scores and sums."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def _inner_sizes(t: Tensor) -> tuple[int, int, int]:
    """H, Sq and Sk of t (..., H, Sq, Sk); H is 1 where there is none."""
    return (t.shape[-3] if t.dim() > 2 else 1), t.shape[-2], t.shape[-1]


def _readable(t: Tensor, shape: torch.Size) -> tuple[Tensor, tuple[int, ...]]:
    """t, or a copy if a kernel cannot walk it, and its strides as (B, H, Sq, Sk) once broadcast to ``shape``."""
    if t.dim() and t.stride(-1) > 1:
        t = t.contiguous()
    strides = _strides(t)
    if len(shape) <= 4:
        return t, (0,) * (4 - len(strides)) + strides
    # Joining dimensions is free where their strides agree: for a contiguous tensor, and where a mask is broadcast over
    # all of them or none. Only a mix ([b, 1, g, h, sq, sk]) is copied, at its own size in the last three dimensions.
    t = t[(None,) * (len(shape) - t.dim())]
    t = t.expand(*shape[:-3], *t.shape[-3:]).reshape(-1, *t.shape[-3:])
    return t, _strides(t)


def _strides(t: Tensor) -> tuple[int, ...]:
    """Strides of t, 0 where it has one element: there nothing need be added, and where it is broadcast nothing may."""
    return tuple([0 if size == 1 else stride for size, stride in zip(t.shape, t.stride())])


# ------------------------------------------------------------------------------------------------------------ kernels
# Integers whose value or alignment says nothing about the code are not specialised on: each would double the number of
# compilations. Strides are: divisible by 16 they make 16-byte accesses, and a stride of 1 is the contiguous case.
_PLAIN = ["scale", "n_rows", "size_h", "size_q"]


@triton.jit(do_not_specialize=_PLAIN)
def _forward_on_chip(
    y_ptr, x_ptr, mask_ptr, scale,
    stride_xb, stride_xh, stride_xq, stride_xk,
    stride_mb, stride_mh, stride_mq, stride_mk,
    n_rows, size_h, size_q, size_k,
    CAUSAL: tl.constexpr, HEADS_INNER: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows: load, softmax, store. Grid (cdiv(n_rows, ROWS),), n_rows = B * H * Sq; size_k <= BLOCK_K.

    y_ptr: (B, H, Sq, Sk) contiguous. x_ptr: (B, H, Sq, Sk) by its strides. mask_ptr: (B, H, Sq, Sk) uint8 by its
    strides, or None. scale: see ``_scalar``.
    """
    row = tl.program_id(0).to(n_rows.dtype) * ROWS + tl.arange(0, ROWS)
    b, h, q = _place(row, size_h, size_q, HEADS_INNER)
    k = tl.arange(0, BLOCK_K)[None, :]
    inside = k < size_k
    if ROWS > 1:  # else the grid has no program without a row
        inside = inside & (row < n_rows)[:, None]
    reach, keep = inside, inside
    if CAUSAL:
        reach = inside & (k < _sector_end(q, x_ptr)[:, None])
        keep = k < tl.minimum(q + 1, size_k)[:, None]

    x_row = _offset(b, h, q, stride_xb, stride_xh, stride_xq)
    x = tl.load(x_ptr + x_row[:, None] + k * stride_xk, mask=reach, other=0.0)
    if mask_ptr is not None:
        m_row = _offset(b, h, q, stride_mb, stride_mh, stride_mq)
        keep = keep & (tl.load(mask_ptr + m_row[:, None] + k * stride_mk, mask=reach, other=1) == 0)

    score = tl.where(keep, x.to(WIDE) * _scalar(scale, WIDE), float("-inf"))
    top = tl.max(score, axis=1)
    part = tl.exp(score - _or_zero(top)[:, None])
    y = part * (1.0 / _or_nan(tl.sum(part, axis=1)))[:, None]
    # the last word is the mask's: a masked position is 0 also in a row that is NaN, for whatever reason
    y = tl.where(keep, y, 0.0).to(y_ptr.dtype.element_ty)
    y_row = (b * size_h + h).to(tl.int64) * size_q + q
    tl.store(y_ptr + (y_row * size_k)[:, None] + k, y, mask=inside)


@triton.jit(do_not_specialize=_PLAIN)
def _forward_long(
    y_ptr, x_ptr, mask_ptr, scale,
    stride_xb, stride_xh, stride_xq, stride_xk,
    stride_mb, stride_mh, stride_mq, stride_mk,
    n_rows, size_h, size_q, size_k,
    CAUSAL: tl.constexpr, HEADS_INNER: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row of any length, twice over, BLOCK_K columns at a time. Grid (n_rows,); arguments as _forward_on_chip."""
    b, h, q = _place(tl.program_id(0).to(n_rows.dtype), size_h, size_q, HEADS_INNER)
    x_row = x_ptr + _offset(b, h, q, stride_xb, stride_xh, stride_xq)
    y_row = y_ptr + ((b * size_h + h).to(tl.int64) * size_q + q) * size_k
    factor = _scalar(scale, WIDE)
    stop, reach = size_k, size_k
    if CAUSAL:
        stop = tl.minimum(size_k, q + 1).to(tl.int32)
        reach = _sector_end(q, x_ptr)

    # `total` is the sum of exp(score - top), `top` the maximum so far: when it moves, the sum is brought over to it
    top = tl.full([], float("-inf"), WIDE)
    total = tl.full([], 0.0, WIDE)
    for start in range(0, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < size_k) & (k < reach)
        keep = k < stop
        x = tl.load(x_row + k * stride_xk, mask=inside, other=0.0, eviction_policy="evict_last")
        if mask_ptr is not None:
            m_row = mask_ptr + _offset(b, h, q, stride_mb, stride_mh, stride_mq)
            keep = keep & (tl.load(m_row + k * stride_mk, mask=inside, other=1) == 0)
        score = tl.where(keep, x.to(WIDE) * factor, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=0))
        total = total * tl.exp(top - _or_zero(higher)) + tl.sum(tl.exp(score - _or_zero(higher)), axis=0)
        top = higher

    inverse = 1.0 / _or_nan(total)
    for start in range(0, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < size_k) & (k < reach)
        keep = k < stop
        x = tl.load(x_row + k * stride_xk, mask=inside, other=0.0, eviction_policy="evict_first")
        if mask_ptr is not None:
            m_row = mask_ptr + _offset(b, h, q, stride_mb, stride_mh, stride_mq)
            keep = keep & (tl.load(m_row + k * stride_mk, mask=inside, other=1) == 0)
        score = tl.where(keep, x.to(WIDE) * factor, float("-inf"))
        y = tl.where(keep, tl.exp(score - _or_zero(top)) * inverse, 0.0)
        tl.store(y_row + k, y.to(y_ptr.dtype.element_ty), mask=k < size_k)
    if CAUSAL:
        _store_zeros(y_row, tl.cdiv(stop, BLOCK_K) * BLOCK_K, size_k, BLOCK_K)


@triton.jit(do_not_specialize=_PLAIN)
def _backward_on_chip(
    dx_ptr, grad_ptr, y_ptr, scale,
    stride_gb, stride_gh, stride_gq, stride_gk,
    n_rows, size_h, size_q, size_k,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows of the gradient. Grid (cdiv(n_rows, ROWS),), n_rows = B * H * Sq; size_k <= BLOCK_K.

    dx_ptr, y_ptr: (B, H, Sq, Sk) contiguous. grad_ptr: (B, H, Sq, Sk) by its strides. scale: see ``_scalar``.
    """
    row = tl.program_id(0).to(n_rows.dtype) * ROWS + tl.arange(0, ROWS)
    b, h, q = _place(row, size_h, size_q, False)
    k = tl.arange(0, BLOCK_K)[None, :]
    inside = k < size_k
    if ROWS > 1:  # else the grid has no program without a row
        inside = inside & (row < n_rows)[:, None]
    reach = inside
    if CAUSAL:
        reach = inside & (k < _sector_end(q, y_ptr)[:, None])

    g_row = _offset(b, h, q, stride_gb, stride_gh, stride_gq)
    at = (row.to(tl.int64) * size_k)[:, None] + k
    g = tl.load(grad_ptr + g_row[:, None] + k * stride_gk, mask=reach, other=0.0).to(WIDE)
    y = tl.load(y_ptr + at, mask=reach, other=0.0).to(WIDE)
    product = tl.where(k <= q[:, None], g * y, 0.0) if CAUSAL else g * y
    dx = _scalar(scale, WIDE) * y * (g - tl.sum(product, axis=1)[:, None])
    if CAUSAL:
        dx = tl.where(k <= q[:, None], dx, 0.0)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_PLAIN)
def _backward_long(
    dx_ptr, grad_ptr, y_ptr, scale,
    stride_gb, stride_gh, stride_gq, stride_gk,
    n_rows, size_h, size_q, size_k,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row of the gradient, twice over, BLOCK_K columns at a time. Grid (n_rows,); else as _backward_on_chip."""
    row = tl.program_id(0).to(n_rows.dtype)
    b, h, q = _place(row, size_h, size_q, False)
    g_row = grad_ptr + _offset(b, h, q, stride_gb, stride_gh, stride_gq)
    y_row = y_ptr + row.to(tl.int64) * size_k
    dx_row = dx_ptr + row.to(tl.int64) * size_k
    factor = _scalar(scale, WIDE)
    stop, reach = size_k, size_k
    if CAUSAL:
        stop = tl.minimum(size_k, q + 1).to(tl.int32)
        reach = _sector_end(q, y_ptr)

    # sums stay in their lanes until the end: one reduction a row, not one a block
    sums = tl.zeros([BLOCK_K], dtype=WIDE)
    for start in range(0, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < size_k) & (k < reach)
        g = tl.load(g_row + k * stride_gk, mask=inside, other=0.0, eviction_policy="evict_last").to(WIDE)
        y = tl.load(y_row + k, mask=inside, other=0.0, eviction_policy="evict_last").to(WIDE)
        sums += tl.where(k < stop, g * y, 0.0)
    total = tl.sum(sums, axis=0)

    for start in range(0, stop, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < size_k) & (k < reach)
        g = tl.load(g_row + k * stride_gk, mask=inside, other=0.0, eviction_policy="evict_first").to(WIDE)
        y = tl.load(y_row + k, mask=inside, other=0.0, eviction_policy="evict_first").to(WIDE)
        dx = tl.where(k < stop, factor * y * (g - total), 0.0)
        tl.store(dx_row + k, dx.to(dx_ptr.dtype.element_ty), mask=k < size_k)
    if CAUSAL:
        _store_zeros(dx_row, tl.cdiv(stop, BLOCK_K) * BLOCK_K, size_k, BLOCK_K)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def _place(row, size_h, size_q, HEADS_INNER: tl.constexpr):
    """b, h, q of a row: q counts fastest, or h does if HEADS_INNER."""
    if HEADS_INNER:
        h, q = row % size_h, row // size_h % size_q
    else:
        h, q = row // size_q % size_h, row % size_q
    return row // (size_h * size_q), h, q


@triton.jit
def _offset(b, h, q, stride_b, stride_h, stride_q):
    """Where a row begins, in elements, 64-bit."""
    return b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + q.to(tl.int64) * stride_q


@triton.jit
def _sector_end(q, ptr):
    """The first column behind the 32-byte sector that holds column q, if the row begins on a sector."""
    SECTOR: tl.constexpr = 256 // ptr.dtype.element_ty.primitive_bitwidth
    return (q // SECTOR + 1) * SECTOR


@triton.jit
def _scalar(value, WIDE: tl.constexpr):
    """The scale: a float32 as it is; for float64 the bits of a double, as ``_launch.scalar_for`` passes them."""
    if WIDE == tl.float64:  # noqa: SIM300 - ruff takes any upper case name for a constant
        value = value.to(tl.int64).to(tl.float64, bitcast=True)
    return value


@triton.jit
def _or_zero(top):
    """The maximum to subtract: 0 where no score is above -inf, so that exp gives 0 and not exp(-inf + inf) = NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _or_nan(total):
    """The sum to divide by: NaN where no score is above -inf. Such a row is NaN in torch, except where masked."""
    return tl.where(total == 0.0, float("nan"), total)


@triton.jit
def _store_zeros(row_ptr, start, size_k, BLOCK_K: tl.constexpr):
    """Zeros in a row from column ``start``, what lies wholly above the diagonal."""
    for first in range(start, size_k, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        tl.store(row_ptr + k, tl.zeros([BLOCK_K], dtype=row_ptr.dtype.element_ty), mask=k < size_k)

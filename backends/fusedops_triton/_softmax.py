"""Scaled masked softmax in Triton: two launchers and four kernels.

Kernels see a tensor as (B, H, Sq, Sk): ranks below four get leading sizes of 1, and for ranks above four the leading
dimensions are merged. A row is the Sk scores of one query.

    rows on chip    A program loads whole rows, once: 2 accesses per element forward and 3 backward, which is the
                    minimum. A program of one warp holds several short rows, so that no row waits for a barrier.
    longer rows     A program reads its row twice, in blocks: first for the maximum and the sum (Milakov and
                    Gimelshein 2018, "Online normalizer calculation for softmax"), then to write the result.

Common to all kernels:

- Scores, sums and exponentials are float32, float64 for float64. `scale` is never rounded to a narrower dtype.
- `x`, `grad` and `mask` are read with their own strides (0 where broadcast) if their last stride is 0 or 1. Otherwise
  they are made contiguous first: every lane would fetch a 32-byte sector for one element.
- With `causal`, reads end with the 32-byte sector that contains the diagonal. Memory does not transfer smaller pieces,
  and a bound that is not a multiple of 16 bytes would make every access of the row scalar. Values of this sector behind
  the diagonal are loaded and discarded before use, so a NaN there does not spread.
- Offsets of rows are 64-bit: b*h*sq*sk exceeds 2**31 in ordinary use. Offsets within a row are 32-bit.
- There are no atomics: the same input gives the same bits.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops_triton._autotune import Tuned, tuned
from fusedops_triton._common import compute_dtype, scalar
from fusedops_triton._launch import Launch, cached_by_layout, scalar_for
from fusedops_triton._settings import Plan, ceil_div, plan, power_of_two

# ---------------------------------------------------------------------------------------------------------- launchers


def softmax_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute ``softmax(where(masked, -inf, scale * x), dim=-1)``. Masked positions and masked rows are exactly 0.

    Args:
        x: (..., Sq, Sk), rank >= 2, float16, bfloat16, float32 or float64, any strides.
        mask: bool or uint8, broadcastable to x, any strides, non-zero = masked; or None.
        scale: finite.
        causal: True also masks k > q.

    Returns:
        (..., Sq, Sk), contiguous, dtype of x.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    x = x.resolve_neg()  # a view such as z.conj().imag, whose memory holds -x
    if mask is not None:  # bool and uint8 have one byte, and every non-zero value masks: one kernel for both
        mask = mask.view(torch.uint8)
    launch = _forward_launch(*_layout(x, mask), causal)
    if launch is None:
        x, mask = _make_supported(x, y.shape), None if mask is None else _make_supported(mask, y.shape)
        launch = _forward_launch(*_layout(x, mask), causal)
        assert launch is not None
    launch(y, y, x, mask, scalar_for(scale, y.dtype))
    return y


def softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Compute ``scale * y * (grad - sum(grad * y, -1))``, the gradient of ``softmax_forward``.

    Args:
        grad: (..., Sq, Sk), the gradient of y, dtype of y, any strides.
        y: (..., Sq, Sk), the result of forward. It is 0 where masked, so no mask is needed.
        scale: as in the forward.
        causal: as in the forward. If True, grad and y are not used where k > q.

    Returns:
        (..., Sq, Sk), contiguous, dtype of y.
    """
    dx = torch.empty_like(y, memory_format=torch.contiguous_format)
    if dx.numel() == 0:
        return dx
    y = y.resolve_neg().contiguous()  # the result of forward is; a y from another source may not be
    grad = grad.resolve_neg()
    launch = _backward_launch(y.shape, grad.stride(), y.dtype, causal)
    if launch is None:
        grad = _make_supported(grad, y.shape)
        launch = _backward_launch(y.shape, grad.stride(), y.dtype, causal)
        assert launch is not None
    launch(dx, dx, grad, y, scalar_for(scale, y.dtype))
    return dx


_Ints = tuple[int, ...]


def _layout(x: Tensor, mask: Tensor | None) -> tuple[_Ints, _Ints, torch.dtype, _Ints | None, _Ints | None]:
    if mask is None:
        return x.shape, x.stride(), x.dtype, None, None
    return x.shape, x.stride(), x.dtype, mask.shape, mask.stride()


@cached_by_layout
def _forward_launch(
    shape: _Ints, x_strides: _Ints, dtype: torch.dtype, mask_shape: _Ints | None, mask_strides: _Ints | None,
    causal: bool,
) -> Launch | Tuned | None:  # fmt: skip
    """Return the launch for non-empty tensors of this layout; None if the kernels do not support the strides."""
    x_walk = _walk(shape, x_strides, shape)
    m_walk = (0, 0, 0, 0) if mask_shape is None or mask_strides is None else _walk(mask_shape, mask_strides, shape)
    if x_walk is None or m_walk is None:
        return None
    n_rows, size_h, size_q, size_k = _sizes(shape)
    sizes = (*x_walk, *m_walk, n_rows, size_h, size_q, size_k)

    def make_launch(setting: Plan) -> Launch:
        # For each query, the heads that share a mask run one after the other. The first head reads the row of the mask
        # from memory, and the others find it in the L2 cache. Otherwise the whole [sq, sk] mask would have to stay in
        # the cache while a head of x is read: 84 MB at 4096 * 4096 in bfloat16; an H100 has 50 MB. With several rows
        # per program the order is not changed: a head is small enough. (A loop over heads inside a program would save a
        # quarter of the L2 traffic, which is not the bottleneck, and would give too few programs for [1, 1, sq, sk].)
        heads_inner = size_h > 1 and setting.rows == 1 and m_walk[1] == 0 and m_walk[2] != 0
        constants = {
            "CAUSAL": causal, "HEADS_INNER": heads_inner,
            "ROWS": setting.rows, "BLOCK_K": setting.block, "WIDE": compute_dtype(dtype),
        }  # fmt: skip
        kernel = _forward_on_chip if setting.on_chip else _forward_long
        return Launch(kernel, (ceil_div(n_rows, setting.rows),), sizes, constants, setting.warps)

    return tuned(make_launch, plan(size_k, dtype.itemsize, inputs=1), power_of_two(size_k), dtype.itemsize)


@cached_by_layout
def _backward_launch(shape: _Ints, grad_strides: _Ints, dtype: torch.dtype, causal: bool) -> Launch | Tuned | None:
    """Return the launch, as ``_forward_launch``. grad has the shape of y, which is contiguous."""
    g_walk = _walk(shape, grad_strides, shape)
    if g_walk is None:
        return None
    n_rows, size_h, size_q, size_k = _sizes(shape)

    def make_launch(setting: Plan) -> Launch:
        constants = {"CAUSAL": causal, "ROWS": setting.rows, "BLOCK_K": setting.block, "WIDE": compute_dtype(dtype)}
        kernel = _backward_on_chip if setting.on_chip else _backward_long
        sizes = (*g_walk, n_rows, size_h, size_q, size_k)
        return Launch(kernel, (ceil_div(n_rows, setting.rows),), sizes, constants, setting.warps)

    return tuned(make_launch, plan(size_k, dtype.itemsize, inputs=2), power_of_two(size_k), dtype.itemsize)


def _sizes(shape: _Ints) -> tuple[int, int, int, int]:
    """Return the number of rows, H, Sq and Sk of (..., H, Sq, Sk). H is 1 for a tensor of rank 2."""
    size_h, size_q, size_k = (1, *shape)[-3:]
    return math.prod(shape[:-1]), size_h, size_q, size_k


def _walk(shape: _Ints, strides: _Ints, full: _Ints) -> tuple[int, int, int, int] | None:
    """Return the strides (B, H, Sq, Sk) of a tensor broadcast to ``full``; None if the kernels do not support them.

    The kernels do not support a last stride above 1, which would be slow, and leading dimensions that cannot be merged.
    The stride is 0 for a dimension of size 1, which may be broadcast. Leading dimensions above four can be merged if
    their strides agree: in a contiguous tensor, and in a mask that is broadcast over all of them or none.
    """
    walk = [0] * (len(full) - len(shape)) + [0 if size == 1 else stride for size, stride in zip(shape, strides)]
    if walk[-1] > 1:
        return None
    b, next_stride = 0, None
    for size, stride in zip(reversed(full[:-3]), reversed(walk[:-3])):
        if size > 1:
            if next_stride not in (None, stride):
                return None
            b, next_stride = (stride if next_stride is None else b), stride * size
    h, q, k = (0, 0, *walk[-3:])[-3:]
    return b, h, q, k


def _make_supported(t: Tensor, full: torch.Size) -> Tensor:
    """Return t if ``_walk`` supports its strides, otherwise a copy."""
    if _walk(t.shape, t.stride(), full) is None:
        t = t.contiguous()
        if _walk(t.shape, t.stride(), full) is None:  # such as [b, 1, g, h, sq, sk]: expand the leading dimensions
            t = t[(None,) * (len(full) - t.dim())]
            t = t.expand(*full[:-3], *t.shape[-3:]).contiguous()
    return t


# ------------------------------------------------------------------------------------------------------------ kernels
# Triton must not specialise on arguments that do not change the generated code: each would double the compilations. It
# does specialise on strides: those divisible by 16 give 16-byte accesses, and 1 is the contiguous case.
_NOT_SPECIALIZED = ["scale", "n_rows", "size_h", "size_q"]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _forward_on_chip(
    y_ptr, x_ptr, mask_ptr, scale,
    stride_xb, stride_xh, stride_xq, stride_xk,
    stride_mb, stride_mh, stride_mq, stride_mk,
    n_rows, size_h, size_q, size_k,
    CAUSAL: tl.constexpr, HEADS_INNER: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute ROWS whole rows. Grid (cdiv(n_rows, ROWS),), n_rows = B * H * Sq; size_k <= BLOCK_K.

    y_ptr: (B, H, Sq, Sk) contiguous. x_ptr: (B, H, Sq, Sk) by its strides. mask_ptr: (B, H, Sq, Sk) uint8 by its
    strides, or None. scale: see ``scalar``.
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

    score = tl.where(keep, x.to(WIDE) * scalar(scale, WIDE), float("-inf"))
    top = tl.max(score, axis=1)
    part = tl.exp(score - _or_zero(top)[:, None])
    y = part * (1.0 / _or_nan(tl.sum(part, axis=1)))[:, None]
    # a masked position is 0 even if its row is NaN
    y = tl.where(keep, y, 0.0).to(y_ptr.dtype.element_ty)
    y_row = (b * size_h + h).to(tl.int64) * size_q + q
    tl.store(y_ptr + (y_row * size_k)[:, None] + k, y, mask=inside)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _forward_long(
    y_ptr, x_ptr, mask_ptr, scale,
    stride_xb, stride_xh, stride_xq, stride_xk,
    stride_mb, stride_mh, stride_mq, stride_mk,
    n_rows, size_h, size_q, size_k,
    CAUSAL: tl.constexpr, HEADS_INNER: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute one row of any length, BLOCK_K columns at a time. Grid (n_rows,). Arguments as in _forward_on_chip."""
    b, h, q = _place(tl.program_id(0).to(n_rows.dtype), size_h, size_q, HEADS_INNER)
    x_row = x_ptr + _offset(b, h, q, stride_xb, stride_xh, stride_xq)
    y_row = y_ptr + ((b * size_h + h).to(tl.int64) * size_q + q) * size_k
    factor = scalar(scale, WIDE)
    stop, reach = size_k, size_k
    if CAUSAL:
        stop = tl.minimum(size_k, q + 1).to(tl.int32)
        reach = _sector_end(q, x_ptr)

    # `total` is the sum of exp(score - top), `top` the maximum so far. The sum is rescaled when the maximum changes.
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


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _backward_on_chip(
    dx_ptr, grad_ptr, y_ptr, scale,
    stride_gb, stride_gh, stride_gq, stride_gk,
    n_rows, size_h, size_q, size_k,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute ROWS whole rows of the gradient. Grid (cdiv(n_rows, ROWS),), n_rows = B * H * Sq; size_k <= BLOCK_K.

    dx_ptr, y_ptr: (B, H, Sq, Sk) contiguous. grad_ptr: (B, H, Sq, Sk) by its strides. scale: see ``scalar``.
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
    dx = scalar(scale, WIDE) * y * (g - tl.sum(product, axis=1)[:, None])
    if CAUSAL:
        dx = tl.where(k <= q[:, None], dx, 0.0)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _backward_long(
    dx_ptr, grad_ptr, y_ptr, scale,
    stride_gb, stride_gh, stride_gq, stride_gk,
    n_rows, size_h, size_q, size_k,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute one row of the gradient, BLOCK_K columns at a time. Grid (n_rows,). Arguments as in _backward_on_chip."""
    row = tl.program_id(0).to(n_rows.dtype)
    b, h, q = _place(row, size_h, size_q, False)
    g_row = grad_ptr + _offset(b, h, q, stride_gb, stride_gh, stride_gq)
    y_row = y_ptr + row.to(tl.int64) * size_k
    dx_row = dx_ptr + row.to(tl.int64) * size_k
    factor = scalar(scale, WIDE)
    stop, reach = size_k, size_k
    if CAUSAL:
        stop = tl.minimum(size_k, q + 1).to(tl.int32)
        reach = _sector_end(q, y_ptr)

    # each lane keeps its sum until the end: one reduction per row instead of one per block
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
    """Return b, h, q of a row. q varies fastest, or h if HEADS_INNER."""
    # one division after the other: the product of the sizes may need more than 32 bits
    if HEADS_INNER:
        h, rest = row % size_h, row // size_h
        return rest // size_q, h, rest % size_q
    q, rest = row % size_q, row // size_q
    return rest // size_h, rest % size_h, q


@triton.jit
def _offset(b, h, q, stride_b, stride_h, stride_q):
    """Return the offset of a row in elements, 64-bit."""
    return b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + q.to(tl.int64) * stride_q


@triton.jit
def _sector_end(q, ptr):
    """Return the first column behind the 32-byte sector that contains column q, if the row starts on a sector."""
    SECTOR: tl.constexpr = 256 // ptr.dtype.element_ty.primitive_bitwidth
    return (q // SECTOR + 1) * SECTOR


@triton.jit
def _or_zero(top):
    """Return the maximum to subtract: 0 if all scores are -inf, so that exp gives 0 and not exp(-inf + inf) = NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _or_nan(total):
    """Return the sum to divide by: NaN if all scores are -inf. As in torch, the row is NaN where it is not masked."""
    return tl.where(total == 0.0, float("nan"), total)


@triton.jit
def _store_zeros(row_ptr, start, size_k, BLOCK_K: tl.constexpr):
    """Store zeros in a row from column ``start``: the blocks that are entirely above the diagonal."""
    for first in range(start, size_k, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        tl.store(row_ptr + k, tl.zeros([BLOCK_K], dtype=row_ptr.dtype.element_ty), mask=k < size_k)

"""Scaled masked softmax in Triton: two launchers, and the kernels of rows that fit on chip.

Kernels see a tensor as (B, H, Sq, Sk): ranks below four get leading sizes of 1, and for ranks above four the leading
dimensions are merged. A row is the Sk scores of one query.

    rows on chip    A program loads whole rows, once: 2 accesses per element forward and 3 backward, which is the
                    minimum. A program of one warp holds several short rows, so that no row waits for a barrier.
    pairs on chip   Rows of two-byte elements of up to twice that width (``_softmax_packed.py``).
    longer rows     A program reads its row twice, in blocks (``_softmax_long.py``).

Common to all kernels:

- Scores, sums and exponentials are float32. `scale` is never rounded to a narrower dtype.
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
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops_triton._jit._bias import unit
from fusedops_triton._jit._common import read, scalar, widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import (
    HALF_RESIDENT,
    PACKED_ABOVE,
    Plan,
    ceil_div,
    packed_plan,
    plan,
)
from fusedops_triton.softmax._softmax_long import (
    NOT_SPECIALIZED,
    NOT_SPECIALIZED_BACKWARD,
    backward_long,
    forward_long,
    store_row,
)
from fusedops_triton.softmax._softmax_packed import backward_packed, forward_packed
from fusedops_triton.softmax._softmax_rows import offset, or_zero, place, place_rows, sector_end

# ---------------------------------------------------------------------------------------------------------- launchers


def softmax_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute ``softmax(where(masked, -inf, scale * x), dim=-1)``. Masked positions and masked rows are exactly 0.

    Args:
        x: (..., Sq, Sk), rank >= 2, float16, bfloat16 or float32, any strides.
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
    packed = _packed_launch(forward_packed, 1, causal or mask is not None, x)
    if packed is not None:
        packed(y, y, x, float(scale))
        return y
    launch = _forward_launch(*_layout(x, mask), causal)
    if launch is None:
        x, mask = _make_supported(x, y.shape), None if mask is None else _make_supported(mask, y.shape)
        launch = _forward_launch(*_layout(x, mask), causal)
        assert launch is not None
    launch(y, y, x, mask, float(scale))
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
    packed = _packed_launch(backward_packed, 2, causal, grad, y)
    if packed is not None:
        packed(dx, dx, grad, y, float(scale))
        return dx
    launch = _backward_launch(y.shape, grad.stride(), y.dtype, causal)
    if launch is None:
        grad = _make_supported(grad, y.shape)
        launch = _backward_launch(y.shape, grad.stride(), y.dtype, causal)
        assert launch is not None
    launch(dx, dx, grad, y, float(scale))
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
) -> Launch | None:  # fmt: skip
    """Return the launch for non-empty tensors of this layout; None if the kernels do not support the strides."""
    x_walk = _walk(shape, x_strides, shape)
    m_walk = (0, 0, 0, 0) if mask_shape is None or mask_strides is None else _walk(mask_shape, mask_strides, shape)
    if x_walk is None or m_walk is None:
        return None
    n_rows, size_h, size_q, size_k = _sizes(shape)
    unit_k, unit_x, unit_m = unit(size_k), _unit_of(x_walk[:3]), _unit_of(m_walk[:3])
    strides = (*[stride // unit_x for stride in x_walk[:3]], *[stride // unit_m for stride in m_walk[:3]])
    sizes = (*strides, n_rows, size_h, size_q, size_k // unit_k)
    setting = plan(size_k, dtype.itemsize, inputs=1)
    # For each query, the heads that share a mask run one after the other. The first head reads the row of the mask
    # from memory, and the others find it in the L2 cache. Otherwise the whole [sq, sk] mask would have to stay in
    # the cache while a head of x is read: 84 MB at 4096 * 4096 in bfloat16; an H100 has 50 MB. With several rows
    # per program the order is not changed: a head is small enough. (A loop over heads inside a program would save a
    # quarter of the L2 traffic, which is not the bottleneck, and would give too few programs for [1, 1, sq, sk].)
    heads_inner = size_h > 1 and setting.rows == 1 and m_walk[1] == 0 and m_walk[2] != 0
    constants = {
        "CAUSAL": causal, "HEADS_INNER": heads_inner, "UNIT": unit_k, "UNIT_X": unit_x, "UNIT_M": unit_m,
        "STEP_X": x_walk[3], "STEP_M": m_walk[3], "BLOCK_K": setting.block,
    }  # fmt: skip
    if not setting.on_chip:
        return Launch(forward_long, (n_rows,), sizes, constants, setting.warps)
    constants |= _tile_of(n_rows, size_q, size_k, setting) | {"FLAT": _is_flat(shape, x_strides)}
    # narrow accesses, bounds tests and the offsets of many rows take more registers than the limit
    few = constants["EVEN"] and min(unit_x, unit_m) >= 8
    fits = few and setting.warps == 1 and setting.rows <= 2
    grid = (ceil_div(n_rows, setting.rows),)
    return Launch(_forward_on_chip, grid, sizes, constants, setting.warps, HALF_RESIDENT if fits else None)


@cached_by_layout
def _backward_launch(shape: _Ints, grad_strides: _Ints, dtype: torch.dtype, causal: bool) -> Launch | None:
    """Return the launch, as ``_forward_launch``. grad has the shape of y, which is contiguous."""
    g_walk = _walk(shape, grad_strides, shape)
    if g_walk is None:
        return None
    n_rows, size_h, size_q, size_k = _sizes(shape)
    unit_k, unit_g = unit(size_k), _unit_of(g_walk[:3])
    sizes = (*[stride // unit_g for stride in g_walk[:3]], n_rows, size_h, size_q, size_k // unit_k)
    setting = plan(size_k, dtype.itemsize, inputs=2)
    constants = {
        "CAUSAL": causal, "UNIT": unit_k, "UNIT_G": unit_g, "STEP_G": g_walk[3], "BLOCK_K": setting.block,
    }  # fmt: skip
    if not setting.on_chip:
        return Launch(backward_long, (n_rows,), sizes, constants, setting.warps)
    constants |= _tile_of(n_rows, size_q, size_k, setting) | {"FLAT": _is_flat(shape, grad_strides)}
    grid = (ceil_div(n_rows, setting.rows),)
    registers = HALF_RESIDENT if setting.warps == 1 else None  # wider rows would spill with a limit
    return Launch(_backward_on_chip, grid, sizes, constants, setting.warps, registers)


def _packed_launch(kernel: Any, inputs: int, excluded: bool, *tensors: Tensor) -> Launch | None:
    """Return the launch of a kernel for rows on chip as pairs; None for other rows and tensors.

    excluded: the call has what the kernel lacks.
    """
    shape, dtype = tensors[0].shape, tensors[0].dtype
    if excluded or shape[-1] <= PACKED_ABOVE[inputs] // 2:
        return None
    ready = all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors)
    return _launch_of_pairs(kernel, shape, dtype, inputs) if ready else None


@cached_by_layout
def _launch_of_pairs(kernel: Any, shape: _Ints, dtype: torch.dtype, inputs: int) -> Launch | None:
    """Return the launch for contiguous tensors; None for rows of other widths."""
    setting = packed_plan(shape[-1], dtype.itemsize, inputs)
    if setting is None:
        return None
    n_rows, unit_k = math.prod(shape[:-1]), unit(shape[-1])
    constants = {"UNIT": unit_k, "PARTS": setting.parts, "PAIRS": setting.columns // 2}
    return Launch(kernel, (n_rows,), (n_rows, shape[-1] // unit_k), constants, setting.warps)


def _tile_of(n_rows: int, size_q: int, size_k: int, setting: Plan) -> dict[str, Any]:
    """Return the constexprs that leave out bounds tests (EVEN) and divisions (TOGETHER) where a tile needs none."""
    even = size_k == setting.block and n_rows % setting.rows == 0
    return {"EVEN": even, "TOGETHER": size_q % setting.rows == 0, "ROWS": setting.rows}


def _unit_of(strides: _Ints) -> int:
    """Return the unit of strides, of which some or all may be 0."""
    return unit(math.gcd(*strides) or 16)


def _is_flat(shape: _Ints, strides: _Ints) -> bool:
    """Return if a tensor of this layout is contiguous."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


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
# UNIT, UNIT_X and UNIT_M give the compiler the alignment of rows: Triton by itself only checks if a stride is divisible
# by 16, and would read rows of 1000 two-byte elements two bytes at a time.


@profiled(do_not_specialize=NOT_SPECIALIZED)
def _forward_on_chip(
    y_ptr, x_ptr, mask_ptr, scale,
    stride_xb, stride_xh, stride_xq, stride_mb, stride_mh, stride_mq, n_rows, size_h, size_q, size_k,
    CAUSAL: tl.constexpr, HEADS_INNER: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr, TOGETHER: tl.constexpr,
    UNIT: tl.constexpr, UNIT_X: tl.constexpr, UNIT_M: tl.constexpr, STEP_X: tl.constexpr, STEP_M: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute ROWS whole rows. Grid (cdiv(n_rows, ROWS),), n_rows = B * H * Sq; Sk = size_k * UNIT <= BLOCK_K.

    y_ptr: (B, H, Sq, Sk) contiguous. x_ptr: (B, H, Sq, Sk) by its strides, which are in units of UNIT_X; the last one
    is STEP_X. mask_ptr: (B, H, Sq, Sk) uint8 by its strides, in units of UNIT_M and STEP_M; or None. scale: see
    ``scalar``. FLAT: x is contiguous. EVEN: all rows and columns of the tile exist. TOGETHER: see ``place_rows``.
    """
    program = tl.program_id(0).to(n_rows.dtype)
    first = program * ROWS
    b, h, q = place_rows(first, size_h, size_q, HEADS_INNER, TOGETHER, ROWS)
    if HEADS_INNER:  # of one row
        b, h, only = place(program, size_h, size_q, True)
        first = (b * size_h + h) * size_q + only
    k = tl.arange(0, BLOCK_K)[None, :]
    at, inside = _tile(first, k, n_rows, size_k, EVEN, UNIT, ROWS, BLOCK_K)
    reach, keep = inside, inside
    if CAUSAL:
        reach = inside & (k < sector_end(q, x_ptr)[:, None])
        keep = inside & (k <= q[:, None])

    x_at = x_ptr + at
    if not FLAT:
        x_at = x_ptr + offset(b, h, q, stride_xb, stride_xh, stride_xq, UNIT_X)[:, None] + k * STEP_X
    m_at = mask_ptr
    if mask_ptr is not None:
        m_at = mask_ptr + offset(b, h, q, stride_mb, stride_mh, stride_mq, UNIT_M)[:, None] + k * STEP_M
        if STEP_M == 1:  # as many elements per access as of x: otherwise the layouts differ
            m_at = tl.max_contiguous(m_at, [1, 128 // x_ptr.dtype.element_ty.primitive_bitwidth])
    if BLOCK_K > 16384:  # 32 elements of a thread: with x before the mask, Triton 3.6 spills 32 bytes in float32
        keep = _kept(m_at, reach, keep)
        x = tl.load(x_at, mask=reach, other=0.0)
    else:
        x = tl.load(x_at, mask=reach, other=0.0)
        keep = _kept(m_at, reach, keep)

    # in units of log2(e), so that exp2 does not multiply
    score = tl.where(keep, widened(x) * (scalar(scale) * 1.4426950408889634), float("-inf"))
    part = tl.exp2(score - or_zero(tl.max(score, axis=1))[:, None])
    total = tl.sum(part, axis=1)
    ordinary = total > 0.0
    if ROWS > 1 and not EVEN:
        ordinary = ordinary | (first + tl.arange(0, ROWS) >= n_rows)
        total = tl.where(total > 0.0, total, 1.0)  # of rows that do not exist: Triton's interpreter warns of 1 / 0
    if tl.min(ordinary.to(tl.int32), axis=0) != 0:
        y = part * (1.0 / total)[:, None]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    else:  # a row is masked, or has infinities, NaN or scores that log2(e) makes infinite
        for i in range(ROWS):
            if program * ROWS + i < n_rows:
                store_row(
                    program * ROWS + i, y_ptr, x_ptr, mask_ptr, scale,
                    stride_xb, stride_xh, stride_xq, stride_mb, stride_mh, stride_mq, size_h, size_q, size_k,
                    CAUSAL, HEADS_INNER, UNIT, UNIT_X, UNIT_M, STEP_X, STEP_M,
                    BLOCK_K, BLOCK_K * ROWS // 8 if ROWS < 8 and BLOCK_K >= 8 else BLOCK_K,
                )  # fmt: skip


@profiled(do_not_specialize=NOT_SPECIALIZED_BACKWARD)
def _backward_on_chip(
    dx_ptr, grad_ptr, y_ptr, scale, stride_gb, stride_gh, stride_gq, n_rows, size_h, size_q, size_k,
    CAUSAL: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr, TOGETHER: tl.constexpr, UNIT: tl.constexpr,
    UNIT_G: tl.constexpr, STEP_G: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute ROWS whole rows of the gradient. Grid (cdiv(n_rows, ROWS),), n_rows = B * H * Sq; Sk <= BLOCK_K.

    dx_ptr, y_ptr: (B, H, Sq, Sk) contiguous. grad_ptr: (B, H, Sq, Sk) by its strides, which are in units of UNIT_G; the
    last one is STEP_G. Other arguments as in _forward_on_chip.
    """
    first = tl.program_id(0).to(n_rows.dtype) * ROWS
    b, h, q = place_rows(first, size_h, size_q, False, TOGETHER, ROWS)
    k = tl.arange(0, BLOCK_K)[None, :]
    at, inside = _tile(first, k, n_rows, size_k, EVEN, UNIT, ROWS, BLOCK_K)
    reach = inside
    if CAUSAL:
        reach = inside & (k < sector_end(q, y_ptr)[:, None])

    g_at = grad_ptr + at
    if not FLAT:
        g_at = grad_ptr + offset(b, h, q, stride_gb, stride_gh, stride_gq, UNIT_G)[:, None] + k * STEP_G
    g = read(g_at, reach)
    y = read(y_ptr + at, reach)
    product = tl.where(k <= q[:, None], g * y, 0.0) if CAUSAL else g * y
    dx = scalar(scale) * y * (g - tl.sum(product, axis=1)[:, None])
    if CAUSAL:
        dx = tl.where(k <= q[:, None], dx, 0.0)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def _tile(first, k, n_rows, size_k, EVEN: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the offsets (ROWS, BLOCK_K) of a tile in a contiguous tensor, 64-bit, and which elements exist."""
    row = tl.arange(0, ROWS)[:, None]
    if EVEN:  # a constant, which Triton removes from loads and stores
        columns = BLOCK_K
        inside = tl.full([1, BLOCK_K], 1, tl.int1)
    else:
        columns = size_k.to(tl.int32) * UNIT
        inside = k < columns
        if ROWS > 1:  # else the grid has no program without a row
            inside = inside & (first + row < n_rows)
    return first.to(tl.int64) * columns + (row * columns + k), inside


@triton.jit
def _kept(m_at, reach, keep):
    """Return which elements are not masked: of ``keep``, those where the mask is 0."""
    if m_at is not None:
        keep = keep & (tl.load(m_at, mask=reach, other=1) == 0)
    return keep

"""The backward of RMSNorm and LayerNorm in Triton, with and without a residual. ``_norm.py`` has what is common.

    rows on chip    A program holds a range of rows, one tile after the other, and reads each element once, most before
                    the tile before is computed; of the widest rows it reads s or grad again, from a cache. Each lane
                    adds up the gradients of weight and bias of its columns, and the program writes one row of sums.
    longer rows     A program reads its row twice, in blocks: first for the two means, then to write the result. The
                    gradients of weight and bias are summed by a kernel over columns, which reads the inputs again.

The rows of sums are added up by ``add_sums``. There are no atomics: the same input gives the same bits.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.ops.norms.arguments import AddLayerNormGradArgs, AddRmsNormGradArgs
from fusedops_triton._jit._bias import add_sums, column_tile, rounded, store_sums, unit
from fusedops_triton._jit._common import read, read_evicting, scalar, widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div, share_columns
from fusedops_triton.norms._norm import columns_of, ready
from fusedops_triton.norms._norm_settings import norm_sums

# ---------------------------------------------------------------------------------------------------------- launchers


def add_layer_norm_backward(a: AddLayerNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, residual, weight and bias in one pass, up to the row length that fits."""
    dtypes = (a.grad_y.dtype if a.needs[0] else None, a.residual_dtype if a.needs[1] else None)
    vectors = (a.weight if a.needs[2] else None, a.bias if a.needs[3] else None)
    return norm_backward(a.grad_y, a.grad_s, a.s, a.mean, a.rstd, a.weight, 0.0, dtypes, vectors)


def add_rms_norm_backward(a: AddRmsNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, residual and weight in one pass, up to the row length that fits."""
    dtypes = (a.grad_y.dtype if a.needs[0] else None, a.residual_dtype if a.needs[1] else None)
    vectors = (a.weight if a.needs[2] else None, None)
    return norm_backward(a.grad_y, a.grad_s, a.s, None, a.rstd, a.weight, a.offset, dtypes, vectors)[:3]


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weight and bias in one pass, up to the row length that fits."""
    dtypes, vectors = (x.dtype if needs[0] else None,), (weight if needs[1] else None, bias if needs[2] else None)
    return norm_backward(grad, None, x, mean, rstd, weight, 0.0, dtypes, vectors)


def rms_norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, offset: float, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x and weight in one pass, up to the row length that fits."""
    dtypes, vectors = (x.dtype if needs[0] else None,), (weight if needs[1] else None, None)
    return norm_backward(grad, None, x, None, rstd, weight, offset, dtypes, vectors)[:2]


def norm_backward(
    grad: Tensor,
    grad_s: Tensor | None,
    s: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float,
    dtypes: tuple[torch.dtype | None, ...],
    vectors: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, of the residual, of the weight and of the bias.

    Args:
        grad: (..., H), the gradient of y, any strides.
        grad_s: (..., H), the gradient of s, any strides; or None without a residual.
        s: (..., H), what was normalized, any strides.
        mean: (...), from the forward of LayerNorm; None for RMSNorm.
        rstd: (...), from the forward.
        weight: as in the forward.
        offset: as in the forward.
        dtypes: the dtype of the gradient of x, and of that of the residual; None for one that is not wanted.
        vectors: the weight and the bias whose gradients are wanted, or None.

    Returns:
        (..., H), contiguous, once for each of ``dtypes``, and (H,) twice; None for a gradient that is not wanted.
    """
    rows = [None if dtype is None else torch.empty(s.shape, dtype=dtype, device=s.device) for dtype in dtypes]
    sums = [None if v is None else torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in vectors]
    wanted = [t for t in (*rows, *sums) if t is not None]
    if s.numel() == 0 or not wanted:
        for vector in sums:
            if vector is not None:
                vector.zero_()
        return *rows, *sums
    inputs = (ready(grad), ready(grad_s), ready(s), ready(mean), ready(rstd), ready(weight))
    sizes = [t.element_size() for t in (grad, grad_s, s, *rows) if t is not None]
    launches = _backward_launches(
        s.numel() // s.shape[-1], s.shape[-1], min(sizes), max(sizes), mean is not None,
        any(v is not None for v in vectors), 2 if weight is None else weight.element_size(),
    )  # fmt: skip
    partial = [_partial(vector, launches.parts) for vector in sums]
    first, second = (*rows, None)[:2]
    if launches.columns is None:
        launches.rows(s, first, second, *partial, *inputs, float(offset))
    else:
        if first is not None or second is not None:
            launches.rows(s, first, second, None, None, *inputs, float(offset))
        if sums[0] is not None or sums[1] is not None:
            launches.columns(s, *partial, inputs[0], *inputs[2:5])
    for vector, parts in zip(sums, partial):
        if vector is not None and parts is not None and parts is not vector:
            add_sums(vector, parts)
    return *rows, *sums


def _partial(vector: Tensor | None, parts: int) -> Tensor | None:
    """Return the tensor (parts, H) for sums, which is the gradient itself if parts == 1."""
    if vector is None or parts == 1:
        return vector
    return torch.empty((parts, vector.numel()), dtype=torch.float32, device=vector.device)


class _Launches(NamedTuple):
    """The launches of a backward."""

    rows: Launch
    columns: Launch | None  # of the gradients of weight and bias, where the first one does not compute them
    parts: int


@cached_by_layout
def _backward_launches(
    n_rows: int, size: int, narrowest: int, widest: int, centered: bool, sums: bool, weight: int
) -> _Launches:
    """Return the launches for (n_rows, size). sums: the gradient of weight or bias is wanted. weight: its bytes."""
    unit_h = unit(size)
    sizes, shared = (n_rows, size // unit_h), {"CENTER": centered, "UNIT": unit_h}
    setting = norm_sums(n_rows, size, widest, sums, centered, weight)
    if setting.on_chip:
        constants = {
            **shared, "JOINED": setting.joined, "AHEAD": setting.ahead, "HELD": setting.held,
            "S_AGAIN": setting.again[0], "GRAD_AGAIN": setting.again[1], "EVEN": size == setting.block,
            "WHOLE": n_rows % setting.rows == 0, "ROWS": setting.rows, "BLOCK": setting.block,
        }  # fmt: skip
        parts = ceil_div(n_rows, setting.steps * setting.rows)
        sizes = (*sizes, setting.steps)
        rows = Launch(_norm_backward_on_chip, (parts,), sizes, constants, setting.warps, setting.registers)
        return _Launches(rows, None, parts)
    constants = {**shared, "BLOCK": setting.block}
    rows = Launch(_norm_backward_long, (n_rows,), sizes, constants, setting.warps)
    columns = share_columns(n_rows, size, narrowest)
    even = columns.are_even(n_rows, size)
    constants = {**shared, "STEPS": columns.steps, "ROWS": columns.rows, "COLS": columns.cols, "EVEN": even}
    grid = (columns.tiles, columns.parts)
    return _Launches(rows, Launch(_norm_backward_sums, grid, sizes, constants, columns.warps), columns.parts)


# ------------------------------------------------------------------------------------------------------------ kernels

_NOT_SPECIALIZED = ["offset", "n_rows", "size"]


@profiled(do_not_specialize=[*_NOT_SPECIALIZED, "steps"])
def _norm_backward_on_chip(
    dx_ptr, dresidual_ptr, dweight_ptr, dbias_ptr, grad_ptr, grad_s_ptr, s_ptr, mean_ptr, rstd_ptr, weight_ptr,
    offset, n_rows, size, steps,
    CENTER: tl.constexpr, JOINED: tl.constexpr, AHEAD: tl.constexpr, HELD: tl.constexpr, S_AGAIN: tl.constexpr,
    GRAD_AGAIN: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute steps * ROWS whole rows, or those that are left. Grid (parts,); H = size * UNIT <= BLOCK.

    dx_ptr, dresidual_ptr: (n_rows, H), or None. dweight_ptr, dbias_ptr: (parts, H), the sums over this program's rows,
    or None. grad_ptr, s_ptr: (n_rows, H). grad_s_ptr: (n_rows, H), or None. mean_ptr, rstd_ptr: (n_rows,). weight_ptr:
    (H,), or None. offset: see ``scalar``. JOINED: see ``NormSums``. AHEAD: so many tiles, 0 to 2, are read while one is
    computed. HELD: the weight is in registers. S_AGAIN, GRAD_AGAIN: after the sum over a row, its s or grad is read
    from a cache, so that it takes no registers during the sum. EVEN: H = BLOCK. WHOLE: n_rows is a multiple of ROWS.
    """
    col = tl.arange(0, BLOCK)
    in_row, columns = columns_of(col, size, UNIT, EVEN, BLOCK)
    share = 1.0 / columns.to(tl.float32)
    if weight_ptr is not None and HELD:
        weight = tl.load(weight_ptr + col, mask=in_row, other=0.0)
    # each lane adds up its own elements; one reduction over rows at the end
    dweight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    # offsets from a scalar, of 32 bits: the addresses of a thread take as few registers as they can
    at = tl.arange(0, ROWS)[:, None] * columns.to(tl.int32) + col[None, :]
    first = tl.program_id(0).to(tl.int64) * (steps * ROWS)
    end = tl.minimum(first + steps * ROWS, n_rows)
    if AHEAD > 0:
        inside = _inside(in_row, first, end, WHOLE, ROWS)
        next_s = tl.load(s_ptr + columns * first + at, mask=inside, other=0.0)
        next_grad = tl.load(grad_ptr + columns * first + at, mask=inside, other=0.0)
    if AHEAD > 1:
        inside = _inside(in_row, first + ROWS, end, False, ROWS)
        later_s = tl.load(s_ptr + columns * (first + ROWS) + at, mask=inside, other=0.0)
        later_grad = tl.load(grad_ptr + columns * (first + ROWS) + at, mask=inside, other=0.0)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        base = columns * start
        inside = _inside(in_row, start, end, WHOLE, ROWS)
        is_row = row < n_rows
        if AHEAD > 0:
            normal, grad = widened(next_s), widened(next_grad)
            then = base + columns * (AHEAD * ROWS)
            following = _inside(in_row, start + AHEAD * ROWS, end, False, ROWS)
            if AHEAD > 1:
                next_s, next_grad = later_s, later_grad
                later_s = tl.load(s_ptr + then + at, mask=following, other=0.0)
                later_grad = tl.load(grad_ptr + then + at, mask=following, other=0.0)
            else:
                next_s = tl.load(s_ptr + then + at, mask=following, other=0.0)
                next_grad = tl.load(grad_ptr + then + at, mask=following, other=0.0)
        else:
            normal = read(s_ptr + base + at, inside)
            grad = read(grad_ptr + base + at, inside)
        rstd = tl.load(rstd_ptr + row, mask=is_row, other=0.0)[:, None]
        if CENTER:
            mean = tl.load(mean_ptr + row, mask=is_row, other=0.0)[:, None]
            normal -= mean
        normal *= rstd
        if dweight_ptr is not None:
            dweight += grad * normal
        if dbias_ptr is not None:
            dbias += grad
        if dx_ptr is not None or dresidual_ptr is not None:
            m = grad
            if weight_ptr is not None:
                if not HELD:
                    weight = tl.load(weight_ptr + col, mask=in_row, other=0.0)
                m = grad * (widened(weight) + scalar(offset))[None, :]
            # rstd * (m - mean(m) - normal * mean(m * normal)), by two instructions an element
            if CENTER:
                # both sums by one reduction: the program waits half as often for its warps
                if JOINED:
                    product, center = tl.split(tl.sum(tl.join(m * normal, m), axis=1) * share)
                else:
                    product, center = tl.reduce((m * normal, m), 1, _add_both)
                    product, center = product * share, center * share
            else:
                product = tl.sum(m * normal, axis=1) * share
            # other policies than above: the compiler must not take both reads for the same
            if S_AGAIN:
                normal = read_evicting(s_ptr + base + at, inside, "evict_first")
                if CENTER:
                    normal -= mean
                normal *= rstd
            if GRAD_AGAIN:
                m = read_evicting(grad_ptr + base + at, inside, "evict_first")
                if weight_ptr is not None:
                    m *= (read_evicting(weight_ptr + col, in_row, "evict_last") + scalar(offset))[None, :]
            if CENTER:
                ds = (m * rstd - center[:, None] * rstd) - normal * (product[:, None] * rstd)
            else:
                ds = (m - normal * product[:, None]) * rstd
            if grad_s_ptr is not None:
                ds += read(grad_s_ptr + base + at, inside)
            if dx_ptr is not None:
                tl.store(dx_ptr + base + at, rounded(ds, dx_ptr), mask=inside)
            if dresidual_ptr is not None:
                tl.store(dresidual_ptr + base + at, rounded(ds, dresidual_ptr), mask=inside)
    to = tl.program_id(0).to(tl.int64) * columns + col
    if dweight_ptr is not None:
        tl.store(dweight_ptr + to, rounded(tl.sum(dweight, axis=0), dweight_ptr), mask=in_row)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + to, rounded(tl.sum(dbias, axis=0), dbias_ptr), mask=in_row)


@triton.jit
def _add_both(a, b, other_a, other_b):
    """Add two pairs of numbers."""
    return a + other_a, b + other_b


@triton.jit
def _inside(in_row, start, end, WHOLE: tl.constexpr, ROWS: tl.constexpr):
    """Return which elements of the ROWS rows from ``start`` exist. WHOLE: all rows do."""
    inside = in_row[None, :] & tl.full([ROWS, 1], 1, tl.int1)
    if not WHOLE:
        inside = inside & (start + tl.arange(0, ROWS) < end)[:, None]
    return inside


@profiled(do_not_specialize=_NOT_SPECIALIZED)
def _norm_backward_long(
    dx_ptr, dresidual_ptr, dweight_ptr, dbias_ptr, grad_ptr, grad_s_ptr, s_ptr, mean_ptr, rstd_ptr, weight_ptr,
    offset, n_rows, size,
    CENTER: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row of any length, BLOCK columns at a time, without dweight_ptr and dbias_ptr. Grid (n_rows,).

    Arguments as in _norm_backward_on_chip.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = size.to(tl.int64) * UNIT
    at = row * columns
    rstd = tl.load(rstd_ptr + row)
    mean = tl.zeros([], dtype=tl.float32)
    if CENTER:
        mean = tl.load(mean_ptr + row)
    # each lane keeps its sums until the end: one reduction per row instead of one per block
    products = tl.zeros([BLOCK], dtype=tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        col = start + tl.arange(0, BLOCK)
        inside = col < columns
        s = read_evicting(s_ptr + at + col, inside, "evict_last")
        m = read_evicting(grad_ptr + at + col, inside, "evict_last")
        if weight_ptr is not None:
            m *= read(weight_ptr + col, inside) + scalar(offset)
        products += m * ((s - mean) * rstd)
        sums += m
    n = columns.to(tl.float32)
    product = tl.sum(products, axis=0) / n
    if CENTER:
        center = tl.sum(sums, axis=0) / n

    for start in range(0, columns, BLOCK):
        col = start + tl.arange(0, BLOCK)
        inside = col < columns
        s = read_evicting(s_ptr + at + col, inside, "evict_first")
        m = read_evicting(grad_ptr + at + col, inside, "evict_first")
        if weight_ptr is not None:
            m *= read(weight_ptr + col, inside) + scalar(offset)
        ds = m - ((s - mean) * rstd) * product
        if CENTER:
            ds -= center
        ds *= rstd
        if grad_s_ptr is not None:
            ds += read(grad_s_ptr + at + col, inside)
        if dx_ptr is not None:
            tl.store(dx_ptr + at + col, rounded(ds, dx_ptr), mask=inside)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + at + col, rounded(ds, dresidual_ptr), mask=inside)


@profiled(do_not_specialize=["n_rows", "size"])
def _norm_backward_sums(
    dweight_ptr, dbias_ptr, grad_ptr, s_ptr, mean_ptr, rstd_ptr, n_rows, size,
    CENTER: tl.constexpr, UNIT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Sum COLS columns of STEPS * ROWS rows. Grid (cdiv(H, COLS), parts). Arguments as in _norm_backward_on_chip."""
    dweight = tl.zeros([ROWS, COLS], dtype=tl.float32)
    dbias = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for step in range(STEPS):
        at, inside, row = column_tile(step, n_rows, size, UNIT, STEPS, ROWS, COLS, EVEN)
        grad = read(grad_ptr + at, inside)
        if dweight_ptr is not None:
            normal = read(s_ptr + at, inside)
            if CENTER:
                normal -= tl.load(mean_ptr + row, mask=row < n_rows, other=0.0)[:, None]
            dweight += grad * (normal * tl.load(rstd_ptr + row, mask=row < n_rows, other=0.0)[:, None])
        if dbias_ptr is not None:
            dbias += grad
    if dweight_ptr is not None:
        store_sums(dweight_ptr, dweight, size, UNIT, COLS)
    if dbias_ptr is not None:
        store_sums(dbias_ptr, dbias, size, UNIT, COLS)

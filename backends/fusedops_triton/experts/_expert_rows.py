"""The rows of the experts in Triton: their order, their copies, and the sums over them.

    route       Three launches sort the routed rows by expert: the experts of each block of rows are counted, torch adds
                the counts up, and each row gets its place, which is the count of the rows before it.
    spread      A program reads a part of a token once, and writes it to the places of its K choices.
    combine     A program reads a part of the K rows of a token, and adds them in their order, in float32.
    sum_groups  A program adds up some columns of the rows of one expert, in their order.

There are no atomics, and the device is not waited for. Rows of no expert are last; they are neither written nor read.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import read, widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch import settings
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import (
    FLAT_PER_THREAD,
    FLAT_THREADS,
    ceil_div,
    gated_columns,
    power_of_two,
    warps_for,
)

_COUNTED = 256  # routed rows of a program of the route
_CHUNK = 16  # experts, or rows, with which it compares them at a time
_UNROLLED = 8  # choices of a token whose rows are loaded at once
_SUM_ROWS, _SUM_COLS = 32, 64  # of a tile of the sums over groups


class Route(NamedTuple):
    """The routed rows sorted by expert, all int32. Row r is choice r % K of token r // K.

    Attributes:
        place: (T, K), the sorted row of each choice; -1 for a sentinel.
        order: (T * K,), the routed row at each sorted row, sentinels last, each in their order.
        group: (T * K,), the expert of each sorted row; E for a sentinel.
        ends: (E,), the end of the sorted rows of each expert.
    """

    place: Tensor
    order: Tensor
    group: Tensor
    ends: Tensor


# ---------------------------------------------------------------------------------------------------------- launchers


def route(index: Tensor, experts: int) -> Route:
    """Sort the routed rows by expert; index (T, K), which is not empty."""
    index = index.contiguous()
    blocks = ceil_div(index.numel(), _COUNTED)
    counts = index.new_empty((experts + 1, blocks), dtype=torch.int32)
    place = torch.empty_like(index, dtype=torch.int32)
    order, group = (index.new_empty(index.numel(), dtype=torch.int32) for _ in range(2))
    ends = index.new_empty(experts, dtype=torch.int32)
    count_rows, place_rows = _route_launches(index.numel(), experts, blocks)
    count_rows(index, counts, index)
    upto = counts.view(-1).cumsum(0, dtype=torch.int32)
    place_rows(index, place, order, group, ends, counts, upto, index)
    return Route(place, order, group, ends)


@cached_by_layout
def _route_launches(n_rows: int, experts: int, blocks: int) -> tuple[Launch, Launch]:
    sizes, constants = (n_rows, experts, blocks), {"ROWS": _COUNTED, "CHUNK": _CHUNK}
    first, second = (Launch(kernel, (blocks,), sizes, constants, 4) for kernel in (_count, _place))
    return first, second


def spread(x: Tensor, place: Tensor, weights: Tensor | None, plain: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the sorted rows of x (T, H), and the same times their weights, each (T * K, H) in the dtype of x.

    Args:
        x: contiguous.
        place: of the route.
        weights: (T, K), contiguous, or None: no weighted rows.
        plain: False leaves the first result out.
    """
    size = (place.numel(), x.shape[1])
    rows = x.new_empty(size) if plain else None
    weighted = None if weights is None else x.new_empty(size)
    if x.numel() and place.numel():
        launch = _token_launch(_spread, *place.shape, x.shape[1], x.element_size())
        launch(x, rows, weighted, x, place, weights)
    return rows, weighted


def combine(rows: Tensor, place: Tensor, weights: Tensor | None, bias: Tensor | None, index: Tensor) -> Tensor:
    """Return the sum over the choices of each token of ``weights * (rows + bias)``, (T, H), the dtype of rows.

    Args:
        rows: (T * K, H), contiguous.
        place: of the route.
        weights: (T, K), contiguous, or None for 1.
        bias: (E, H), contiguous, or None.
        index: (T, K), contiguous.
    """
    y = rows.new_empty((place.shape[0], rows.shape[1]))
    if y.numel():
        launch = _token_launch(_combine, *place.shape, rows.shape[1], rows.element_size())
        launch(y, y, rows, place, weights, bias, index)
    return y


@cached_by_layout
def _token_launch(kernel: Any, tokens: int, choices: int, size: int, element_size: int) -> Launch:
    """Return the launch of ``_spread`` or ``_combine``: 16 bytes of a row for each thread."""
    per_thread = FLAT_PER_THREAD[element_size] // 2
    tile = per_thread * FLAT_THREADS
    cols = gated_columns(size, tile, element_size)
    rows = min(tile // cols, power_of_two(tokens))
    unit_h = unit(size)
    constants = {
        "K": choices, "UNROLLED": choices <= _UNROLLED, "UNIT": unit_h, "ROWS": rows, "COLS": cols,
    }  # fmt: skip
    grid = (ceil_div(size, cols) * ceil_div(tokens, rows),)
    return Launch(kernel, grid, (tokens, size // unit_h), constants, warps_for(rows * cols, per_thread))


def sum_groups(rows: Tensor, order: Tensor | None, ends: Tensor, weights: Tensor | None, like: Tensor) -> Tensor:
    """Return the sum of ``weights * rows`` over the rows of each expert, (E, H), the dtype of ``like``.

    Args:
        rows: (S, H), contiguous, sorted.
        order: of the route, read with ``weights`` alone.
        ends: (E,), int32.
        weights: (T, K), contiguous, or None for 1.
        like: (E, H).
    """
    sums = torch.empty_like(like, memory_format=torch.contiguous_format)
    if sums.numel():
        launch = _sums_launch(*sums.shape)
        launch(sums, sums, rows, order, weights, ends)
    return sums


@cached_by_layout
def _sums_launch(experts: int, size: int) -> Launch:
    tiles = ceil_div(size, _SUM_COLS)
    constants = {"ROWS": _SUM_ROWS, "COLS": _SUM_COLS}
    return Launch(_sum_groups, (experts * tiles,), (size, tiles), constants, 4)


def clear_empty(weight: Tensor, ends: Tensor) -> None:
    """Set the elements of the experts without rows to 0; weight (E, ...), contiguous."""
    experts, size = weight.shape[0], weight[0].numel()
    _clear_launch(experts, size, weight.element_size())(weight, weight, ends)


@cached_by_layout
def _clear_launch(experts: int, size: int, element_size: int) -> Launch:
    block = FLAT_PER_THREAD[element_size] * FLAT_THREADS
    parts = min(ceil_div(size, block), ceil_div(16 * settings.chip.fills, experts))
    return Launch(_clear, (experts * parts,), (size, parts), {"BLOCK": block}, 4)


# ------------------------------------------------------------------------------------------------------ jit functions


@triton.jit
def experts_at(index_ptr, at, n_rows, experts):
    """Return the experts of some routed rows: ``experts`` for a sentinel, -1 past the last row."""
    e = tl.load(index_ptr + at, at < n_rows, 0)
    e = tl.where((e < 0) | (e >= experts), experts, e).to(tl.int32)
    return tl.where(at < n_rows, e, -1)


@profiled()
def _count(counts_ptr, index_ptr, n_rows, experts, blocks, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Count the rows of each expert, and the sentinels, of ROWS rows. Grid (blocks,). counts_ptr: (E + 1, blocks)."""
    block = tl.program_id(0)
    e = experts_at(index_ptr, block * ROWS + tl.arange(0, ROWS), n_rows, experts)
    for first in range(0, experts + 1, CHUNK):
        which = first + tl.arange(0, CHUNK)
        count = tl.sum((e[:, None] == which[None, :]).to(tl.int32), 0)
        tl.store(counts_ptr + which.to(tl.int64) * blocks + block, count, which <= experts)


@profiled()
def _place(
    place_ptr, order_ptr, group_ptr, ends_ptr, counts_ptr, upto_ptr, index_ptr, n_rows, experts, blocks,
    ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the place of ROWS rows, and what is at these places. Grid (blocks,). upto_ptr: the sums of the counts."""
    block = tl.program_id(0)
    at = block * ROWS + tl.arange(0, ROWS)
    e = experts_at(index_ptr, at, n_rows, experts)
    rank = tl.zeros((ROWS,), tl.int32)
    for first in range(0, ROWS, CHUNK):
        other_at = block * ROWS + first + tl.arange(0, CHUNK)
        other = experts_at(index_ptr, other_at, n_rows, experts)
        before = (e[:, None] == other[None, :]) & (other_at[None, :] < at[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
    inside = at < n_rows
    cell = e.to(tl.int64) * blocks + block
    place = tl.load(upto_ptr + cell, inside, 0) - tl.load(counts_ptr + cell, inside, 0) + rank
    tl.store(place_ptr + at, tl.where(e == experts, -1, place), inside)
    tl.store(order_ptr + place, at, inside)
    tl.store(group_ptr + place, e, inside)
    if block == 0:
        for first in range(0, experts, CHUNK):
            which = first + tl.arange(0, CHUNK)
            last = which.to(tl.int64) * blocks + blocks - 1
            tl.store(ends_ptr + which, tl.load(upto_ptr + last, which < experts, 0), which < experts)


@triton.jit
def _tile(size, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return this program's rows and columns (64-bit), and the number of columns."""
    columns = size.to(tl.int64) * UNIT
    tiles = ((columns + COLS - 1) // COLS).to(tl.uint32)
    program = tl.program_id(0).to(tl.uint32)
    row = (program // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = (program % tiles).to(tl.int64) * COLS + tl.arange(0, COLS)
    return row, col, columns


@profiled(do_not_specialize=["tokens", "size"])
def _spread(
    rows_ptr, weighted_ptr, x_ptr, place_ptr, weights_ptr, tokens, size,
    K: tl.constexpr, UNROLLED: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Copy ROWS * COLS elements K times. Grid (cdiv(H, COLS) * cdiv(tokens, ROWS),), H = size * UNIT."""
    row, col, columns = _tile(size, UNIT, ROWS, COLS)
    there = row < tokens
    inside = there[:, None] & (col < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * columns + col[None, :], inside, 0.0)
    if UNROLLED:
        for k in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
            _copy(rows_ptr, weighted_ptr, x, place_ptr, weights_ptr, row * K + k, there, col, columns)
    else:
        for k in range(K):
            _copy(rows_ptr, weighted_ptr, x, place_ptr, weights_ptr, row * K + k, there, col, columns)


@triton.jit
def _copy(rows_ptr, weighted_ptr, x, place_ptr, weights_ptr, choice, there, col, columns):
    place = tl.load(place_ptr + choice, there, -1)
    to = place.to(tl.int64)[:, None] * columns + col[None, :]
    inside = (place >= 0)[:, None] & (col < columns)[None, :]
    if rows_ptr is not None:
        tl.store(rows_ptr + to, x, inside)
    if weighted_ptr is not None:
        weight = tl.load(weights_ptr + choice, there, 0.0).to(tl.float32)
        tl.store(weighted_ptr + to, rounded(widened(x) * weight[:, None], weighted_ptr), inside)


@profiled(do_not_specialize=["tokens", "size"])
def _combine(
    y_ptr, rows_ptr, place_ptr, weights_ptr, bias_ptr, index_ptr, tokens, size,
    K: tl.constexpr, UNROLLED: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS * COLS elements. Grid as in ``_spread``."""
    row, col, columns = _tile(size, UNIT, ROWS, COLS)
    there = row < tokens
    total = tl.zeros((ROWS, COLS), tl.float32)
    if UNROLLED:
        for k in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
            choice = row * K + k
            total += _term(rows_ptr, place_ptr, weights_ptr, bias_ptr, index_ptr, choice, there, col, columns)
    else:
        for k in range(K):
            choice = row * K + k
            total += _term(rows_ptr, place_ptr, weights_ptr, bias_ptr, index_ptr, choice, there, col, columns)
    inside = there[:, None] & (col < columns)[None, :]
    tl.store(y_ptr + row[:, None] * columns + col[None, :], rounded(total, y_ptr), inside)


@triton.jit
def _term(
    rows_ptr, place_ptr, weights_ptr, bias_ptr, index_ptr, choice, there, col, columns
):  # fmt: skip
    """Return a choice's part of the sum, 0 for a sentinel."""
    place = tl.load(place_ptr + choice, there, -1)
    known = place >= 0
    inside = known[:, None] & (col < columns)[None, :]
    term = read(rows_ptr + place.to(tl.int64)[:, None] * columns + col[None, :], inside)
    if bias_ptr is not None:
        e = tl.load(index_ptr + choice, known, 0).to(tl.int64)
        term += read(bias_ptr + e[:, None] * columns + col[None, :], inside)
    if weights_ptr is not None:
        term *= tl.load(weights_ptr + choice, known, 0.0).to(tl.float32)[:, None]
    return tl.where(known[:, None], term, 0.0)


@profiled()
def _sum_groups(
    sums_ptr, rows_ptr, order_ptr, weights_ptr, ends_ptr, size, tiles,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Add up COLS columns of the rows of an expert. Grid (E * tiles,)."""
    expert, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    start, end = group_of(ends_ptr, expert)
    col = tile * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * size + col[None, :]
        value = read(rows_ptr + at, (row < end)[:, None] & (col < size)[None, :])
        if weights_ptr is not None:
            routed = tl.load(order_ptr + row, row < end, 0)
            value *= tl.load(weights_ptr + routed, row < end, 0.0).to(tl.float32)[:, None]
        total += value
    sums = tl.sum(total, 0)
    tl.store(sums_ptr + expert.to(tl.int64) * size + col, rounded(sums, sums_ptr), col < size)


@triton.jit
def group_of(ends_ptr, expert):
    """Return the first row of an expert, and the end of its rows."""
    return tl.load(ends_ptr + expert - 1, expert > 0, 0), tl.load(ends_ptr + expert)


@profiled()
def _clear(weight_ptr, ends_ptr, size, parts, BLOCK: tl.constexpr):
    """Set a share of the elements of an expert to 0 if it has no rows. Grid (E * parts,)."""
    expert, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    start, end = group_of(ends_ptr, expert)
    if start == end:
        base = weight_ptr + expert.to(tl.int64) * size
        for first in range(part * BLOCK, size, parts * BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(base + at, tl.zeros((BLOCK,), weight_ptr.dtype.element_ty), at < size)

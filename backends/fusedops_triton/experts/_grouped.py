"""The products of the rows of each expert with its weight, in one launch for all experts.

torch's grouped_mm has those of bfloat16 from compute capability 9.0 on. The kernels here have the others: those of
other dtypes, of rows that are not multiples of 16 bytes, of older devices and of ROCm, for which grouped_mm is a loop
that reads the ends of the groups from the device.

    rows       A program computes a tile of the output. Tiles do not cross from an expert to the next: each program
               finds its tile from the ends of the groups.
    weights    A program computes a tile of the gradient of one expert's weight, over all of its rows.

Products are added up in float32, those of float32 without TF32. Rows past the last end are neither read nor written.
The size of a tile does not depend on the number of rows, so that a row's bits do not.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from functools import cache
from math import gcd
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import TYPES
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.experts._expert_rows import clear_empty, group_of
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None)  # since torch 2.10


class Tiles(NamedTuple):
    """The size of a tile of the output, the length of a step, and the warps of a program."""

    m: int
    n: int
    k: int
    warps: int


#: Of 16-bit products, which tensor cores have; and of others, and of rows that are read few bytes at a time, for which
#: a thread holds many addresses.
LARGE, SMALL = Tiles(128, 128, 64, 8), Tiles(64, 64, 32, 4)


#: Rows of an expert, on average, up to which they are multiplied without a copy, and with their activation.
_FUSED_ROWS = 256


def _tiles(dtype: torch.dtype, *sizes: int) -> tuple[Tiles, int]:
    """Return the tiles of a product of a dtype, and the power of two, up to 16, that divides all sizes."""
    common = unit(gcd(*sizes))
    return LARGE if dtype.itemsize == 2 and common >= 8 else SMALL, common


# ---------------------------------------------------------------------------------------------------------- launchers


class Packed(Protocol):
    """A packed weight of all experts, (E, N, K), by its products."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the unpacked weight."""
        ...

    def products(self, rows: Tensor, ends: Tensor, swapped: bool) -> Tensor:
        """Return what ``rows_by_weight`` does."""
        ...


def rows_by_weight(rows: Tensor, weight: Tensor | Packed, ends: Tensor, swapped: bool) -> Tensor:
    """Return the product of each row with the weight of its expert, (S, N), in the dtype of rows.

    Args:
        rows: (S, L), contiguous, sorted by expert.
        weight: (E, L, N); ``swapped``: (E, N, L).
        ends: (E,), int32. What is past the last one is not written.
        swapped: the last two dims of ``weight`` are swapped.
    """
    if not isinstance(weight, Tensor):
        return weight.products(rows, ends, swapped)
    size, length = weight.shape[1 if swapped else 2], rows.shape[1]
    if _is_taken(rows, weight):
        return _grouped_mm(rows, _readable(weight.mT if swapped else weight), offs=ends)
    y = rows.new_empty((rows.shape[0], size))
    if y.numel() and weight.shape[0]:
        dtype = torch.promote_types(rows.dtype, weight.dtype)
        weight, swapped = in_order(weight, swapped)
        launch = _rows_launch(rows.shape[0], weight.shape[0], size, length, swapped, dtype)
        launch(y, y, rows, weight, ends)
    return y


@cached_by_layout
def _rows_launch(n_rows: int, experts: int, size: int, length: int, swapped: bool, dtype: torch.dtype) -> Launch:
    tiles, common = _tiles(dtype, size, length)
    across = ceil_div(size, tiles.n)
    constants = {
        "SWAPPED": swapped, "EVEN": length % tiles.k == 0, "UNIT": common, "STEPS": (experts - 1).bit_length(),
        **constants_of(_rows, dtype, tiles),
    }  # fmt: skip
    grid = ((n_rows // tiles.m + experts) * across,)  # see ``_first_tile``
    return Launch(_rows, grid, (experts, size // common, length // common, across), constants, tiles.warps)


def weights_of_rows(one: Tensor, other: Tensor, ends: Tensor, like: Tensor) -> Tensor:
    """Return ``one.T @ other`` of the rows of each expert, (E, M, N), in the dtype of ``like``; 0 without rows.

    Args:
        one: (S, M), contiguous, sorted by expert.
        other: (S, N), likewise.
        ends: (E,), int32.
        like: (E, M, N).
    """
    if _is_taken(one, other) and like.dtype is torch.bfloat16:
        result = _grouped_mm(one.t(), other, offs=ends)
        clear_empty(result, ends)
        return result
    result = torch.empty_like(like, memory_format=torch.contiguous_format)
    if result.numel():
        launch = _weights_launch(*result.shape, torch.promote_types(one.dtype, like.dtype))
        launch(result, result, one, other, ends)
    return result


@cached_by_layout
def _weights_launch(experts: int, size_m: int, size_n: int, dtype: torch.dtype) -> Launch:
    tiles, common = _tiles(dtype, size_m, size_n)
    down, across = ceil_div(size_m, tiles.m), ceil_div(size_n, tiles.n)
    constants = {"UNIT": common, **constants_of(_weights, dtype, tiles)}
    sizes = (size_m // common, size_n // common, down, across)
    return Launch(_weights, (experts * down * across,), sizes, constants, tiles.warps)


def constants_of(kernel: Any, dtype: torch.dtype, tiles: Tiles) -> dict[str, Any]:
    """Return the constexprs of a product of a dtype.

    The interpreter has no products of bfloat16. Those of float32 are the same.
    """
    factors = dtype if isinstance(kernel, JITFunction) else torch.float32
    return {"OF": TYPES[factors], "BM": tiles.m, "BN": tiles.n, "BK": tiles.k}


def _is_taken(one: Tensor, other: Tensor) -> bool:
    """Return True where torch's grouped_mm has the product in one kernel, which reads nothing from the device."""
    return (
        _grouped_mm is not None
        and one.is_cuda
        and one.dtype is torch.bfloat16
        and other.dtype is torch.bfloat16
        and one.numel() > 0
        and other.numel() > 0
        and all(size % 8 == 0 for size in (one.shape[-1], *other.shape[-2 if other.dim() == 3 else -1 :]))
        and _is_new_enough(one.device.index)
    )


def is_by_torch(x: Tensor, up: Tensor, n_rows: int) -> bool:
    """Return True where torch multiplies the sorted copies of ``n_rows`` rows of x with up: it has the product, and
    there are so many rows that the product takes longer than to read the weights.

    H200: an expert's weights, 4.28 TB/s, take as long as 185 rows, 790 TFLOP/s.
    """
    return n_rows > _FUSED_ROWS * up.shape[0] and _is_taken(x, up)


@cache
def _is_new_enough(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def in_order(weight: Tensor, swapped: bool) -> tuple[Tensor, bool]:
    """Return a contiguous weight, and whether its last two dims are swapped: a view of one is not copied."""
    weight = weight.resolve_neg()
    if not weight.is_contiguous() and weight.mT.is_contiguous():
        return weight.mT, not swapped
    return weight.contiguous(), swapped


def _readable(weight: Tensor) -> Tensor:
    """Return a weight as grouped_mm reads it: contiguous or swapped, its rows at multiples of 16 bytes."""
    weight = weight.resolve_neg()
    if (weight.is_contiguous() or weight.mT.is_contiguous()) and weight.data_ptr() % 16 == 0:
        return weight
    return weight.clone(memory_format=torch.contiguous_format)


# ------------------------------------------------------------------------------------------------------ jit functions


# UNIT gives the compiler the alignment of rows, also of those whose sizes are not multiples of 16.


@profiled(do_not_specialize=["experts", "size", "length", "across"])
def _rows(
    y_ptr, rows_ptr, weight_ptr, ends_ptr, experts, size, length, across,
    SWAPPED: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr, STEPS: tl.constexpr,
    OF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute BM * BN elements. Grid (tiles * across,), with as many tiles as there may be; the last ones are empty.

    size, length: over UNIT.
    """
    size, length = size * UNIT, length * UNIT
    tile, n = tl.program_id(0) // across, (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    expert, first_row = expert_of_tile(ends_ptr, tile, experts, STEPS, BM)
    end = tl.load(ends_ptr + expert)
    if first_row < end:
        m = first_row + tl.arange(0, BM)
        lines = rows_ptr + m.to(tl.int64)[:, None] * length
        weight = weight_ptr + expert.to(tl.int64) * size * length
        total = products(lines, m < end, weight, n, n < size, size, length, length, SWAPPED, EVEN, OF, BK)
        to = m.to(tl.int64)[:, None] * size + n[None, :]
        tl.store(y_ptr + to, rounded(total, y_ptr), (m < end)[:, None] & (n < size)[None, :])


@triton.jit
def products(
    lines, there, weight, n, inside, size, length, reach,
    SWAPPED: tl.constexpr, EVEN: tl.constexpr, OF: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return the products of some rows with some columns of a weight, float32.

    Args:
        lines: (BM, 1), where each row begins.
        there: (BM,), False for rows that are not read.
        weight: where the weight begins.
        n: (BN,), the columns.
        inside: (BN,), False for columns that are not read.
        size: columns of the weight.
        length: of a row.
        reach: ``length``, or 0: all products are 0.
        SWAPPED: the elements of a column of the weight are next to each other.
        EVEN: length is a multiple of BK.
        OF: the dtype that is multiplied.
        BK: elements of a row at a time.
    """
    columns = weight + (n.to(tl.int64) * length if SWAPPED else n)[None, :]
    total = tl.zeros((there.shape[0], n.shape[0]), tl.float32)
    for first in range(0, reach, BK):
        at = first + tl.arange(0, BK)
        fits = at < length
        if EVEN:
            fits = at >= 0
        one = tl.load(lines + at[None, :], there[:, None] & fits[None, :], 0.0)
        down = at if SWAPPED else at.to(tl.int64) * size
        other = tl.load(columns + down[:, None], inside[None, :] & fits[:, None], 0.0)
        total = tl.dot(one.to(OF), other.to(OF), total, input_precision="ieee", out_dtype=tl.float32)
    return total


@triton.jit
def expert_of_tile(ends_ptr, tile, experts, STEPS: tl.constexpr, BM: tl.constexpr):
    """Return the expert of a tile by a binary search, and the tile's first row, which may be behind the expert's end.

    ends_ptr is read below the last of ``experts`` alone.
    """
    expert, highest = tl.full([], 0, tl.int32), experts - 1
    for _ in range(STEPS):
        middle = (expert + highest + 1) // 2
        reached = _first_tile(ends_ptr, middle, BM) <= tile
        expert, highest = tl.where(reached, middle, expert), tl.where(reached, highest, middle - 1)
    start = tl.load(ends_ptr + expert - 1, expert > 0, 0)
    return expert, start + (tile - _first_tile(ends_ptr, expert, BM)) * BM


@triton.jit
def _first_tile(ends_ptr, expert, BM: tl.constexpr):
    """Return the number of an expert's first tile, which has numbers for as many tiles as its rows may take.

    Rows from ``start`` to ``end`` are in at most ``end // BM - start // BM + 1`` tiles.
    """
    return tl.load(ends_ptr + expert - 1, expert > 0, 0) // BM + expert


@profiled(do_not_specialize=["size_m", "size_n", "down", "across"])
def _weights(
    result_ptr, one_ptr, other_ptr, ends_ptr, size_m, size_n, down, across,
    UNIT: tl.constexpr, OF: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute BM * BN elements of one expert. Grid (E * down * across,). size_m, size_n: over UNIT."""
    size_m, size_n = size_m * UNIT, size_n * UNIT
    expert, tile = tl.program_id(0) // (down * across), tl.program_id(0) % (down * across)
    m, n = (tile // across) * BM + tl.arange(0, BM), (tile % across) * BN + tl.arange(0, BN)
    start, end = group_of(ends_ptr, expert)
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(start, end, BK):
        row = first + tl.arange(0, BK)
        there = (row < end)[:, None]
        at = row.to(tl.int64)[:, None]
        one = tl.load(one_ptr + at * size_m + m[None, :], there & (m < size_m)[None, :], 0.0)
        other = tl.load(other_ptr + at * size_n + n[None, :], there & (n < size_n)[None, :], 0.0)
        total = tl.dot(tl.trans(one.to(OF)), other.to(OF), total, input_precision="ieee", out_dtype=tl.float32)
    to = result_ptr + expert.to(tl.int64) * size_m * size_n + m.to(tl.int64)[:, None] * size_n + n[None, :]
    tl.store(to, rounded(total, result_ptr), (m < size_m)[:, None] & (n < size_n)[None, :])

"""Helpers for kernels with a bias: the bias of an element of x, and sums over columns for the gradient of the bias.

Kernels see x as a flat, contiguous tensor of n elements. A program gets a tile of BLOCK elements, independent of the
length of a row. So tiles are aligned and full for every shape, and the four elements that share a Philox call are
always in one tile.

The gradient of a bias (H,) is summed by two kernels. They use no atomics, so the same input gives the same bits.

    1. In the same pass as dx: a program sums COLS columns over a range of rows and writes one row of sums.
    2. The rows of sums, one for every 64 or more rows of x, are added up. This moves at most 3 % of the bytes.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import LARGEST_TILE, Columns, ceil_div, share_sums

# ---------------------------------------------------------------------------------------------------------- launchers


def unit(n: int) -> int:
    """Return the largest power of two, up to 16, that divides ``n``.

    A size is passed to a kernel as ``n // unit(n)`` and the constexpr UNIT, so that the compiler knows the alignment of
    rows. Triton by itself only checks if a size is divisible by 16: it would read rows of 1000 two-byte elements two
    bytes at a time.
    """
    return min(n & -n, 16)


class BiasLayout(NamedTuple):
    """A bias and its position in x, as ``bias_at`` needs them."""

    tensor: Tensor | None  # contiguous
    # "none"; "all": the shape of x, to which a bias of any other shape is expanded; "tail": the last dimensions of x;
    # "long tail": the same, at least as long as a tile
    kind: str
    unit: int
    sizes: tuple[int, int, int]  # size, multiplier, shift: see ``bias_at``

    @property
    def columns(self) -> int:
        """H, if the bias has the shape (H,) for an x viewed as (rows, H); otherwise 0."""
        return self.sizes[0] * self.unit if self.kind in ("tail", "long tail") else 0


_NO_SIZES = (0, 0, 0)
_NO_BIAS = BiasLayout(None, "none", 1, _NO_SIZES)


def locate(bias: Tensor | None, shape: torch.Size) -> BiasLayout:
    """Return the layout of ``bias`` for an x of ``shape``. x is not empty, and the bias broadcasts to it."""
    if bias is None:
        return _NO_BIAS
    kind, bias_unit, sizes = _locate(bias.shape, shape)
    if kind == "all" and bias.numel() != shape.numel():
        bias = bias.expand(shape)  # copied below, at the size of x
    return BiasLayout(bias.resolve_neg().contiguous(), kind, bias_unit, sizes)


@cached_by_layout
def _locate(bias: tuple[int, ...], shape: tuple[int, ...]) -> tuple[str, int, tuple[int, int, int]]:
    """Return the kind, unit and sizes of a ``BiasLayout`` from the two shapes."""
    size = math.prod(bias)
    if size == math.prod(shape):
        return "all", 1, _NO_SIZES
    lasts = shape[len(shape) - len(bias) :]
    while bias and bias[0] == 1:  # what is left is the last dims of x, or has a size of 1 between others
        bias, lasts = bias[1:], lasts[1:]
    if bias != lasts or size >= 2**31:  # bias_at has 32-bit columns
        return "all", 1, _NO_SIZES
    kind = "long tail" if size >= LARGEST_TILE else "tail"  # a tile contains at most one end of such a row
    return kind, unit(size), (size // unit(size), *_multiplier(size))


def _multiplier(divisor: int) -> tuple[int, int]:
    """Return the multiplier, as the int32 with the same bits, and the shift with which ``_remainder`` divides.

    From Granlund and Montgomery 1994, "Division by invariant integers using multiplication": with 31 + b bits, where b
    bits hold ``divisor - 1``, the quotient is exact for every number below 2**31.
    """
    bits = (divisor - 1).bit_length()
    multiplier = ceil_div(2 ** (31 + bits), divisor)
    return multiplier - 2**32 if multiplier >= 2**31 else multiplier, bits - 1


def kind_in_tiles(kind: str, columns: int, block: int) -> str:
    """Return the kind of a bias in tiles of ``block`` elements, a power of two.

    "whole tail": rows are whole tiles, so that no tile contains the end of a row. "short tail": tiles are whole rows.
    """
    if kind in ("tail", "long tail") and columns % block == 0:
        return "whole tail"
    return "short tail" if kind == "tail" and block % columns == 0 else kind


def sum_to_bias(du: Tensor, bias: Tensor) -> Tensor:
    """Return the gradient of a bias of any shape from ``du``, the gradient of ``x + bias``.

    It is slower than the sum over columns, because ``du`` is a tensor of the size of x.
    """
    return du.sum_to_size(bias.shape).to(bias.dtype)


def allocate_sums(columns: Columns, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the gradient of a bias and the tensor (parts, H) for its sums, the same tensor if parts == 1."""
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    if columns.parts == 1:
        return dbias, dbias
    return dbias, torch.empty((columns.parts, bias.numel()), dtype=torch.float32, device=bias.device)


def add_sums(dbias: Tensor, sums: Tensor) -> None:
    """Compute ``dbias = sums.sum(0)`` in a fixed order."""
    _sums_launch(*sums.shape)(dbias, dbias, sums)


@cached_by_layout
def _sums_launch(parts: int, size: int) -> Launch:
    share = share_sums(parts, size)
    constants = {"STEPS": share.steps, "ROWS": share.rows, "COLS": share.cols}
    return Launch(_add_sums, (share.tiles,), (parts, size), constants, share.warps)


# ------------------------------------------------------------------------------------------------------------ kernels


@profiled(do_not_specialize=["parts"])
def _add_sums(
    dbias_ptr, sums_ptr, parts, size, STEPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Add up COLS columns of sums (parts, size); parts <= STEPS * ROWS. Grid (cdiv(size, COLS),)."""
    col = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], dtype=sums_ptr.dtype.element_ty)
    for step in range(STEPS):
        part = step * ROWS + tl.arange(0, ROWS)
        inside = (part < parts)[:, None] & (col < size)[None, :]
        total += tl.load(sums_ptr + part.to(tl.int64)[:, None] * size + col[None, :], mask=inside, other=0.0)
    tl.store(dbias_ptr + col, rounded(tl.sum(total, axis=0), dbias_ptr), mask=col < size)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def flat_tile(n, UNIT: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Return the first element of this program (64-bit), the offsets of its elements, and which are below n * UNIT.

    EVEN: all are. They are a constant then, which Triton removes from loads and stores.
    """
    base = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    if EVEN:
        return base, at, tl.full([BLOCK], 1, tl.int1)
    return base, at, at < n.to(tl.int64) * UNIT - base


@triton.jit
def bias_at(
    bias_ptr, base, at, inside, size, multiplier, shift,
    KIND: tl.constexpr, UNIT: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Load the bias of the elements base + at. ``locate`` and ``kind_in_tiles`` compute the arguments from ``size`` on.

    multiplier, shift: of ``_remainder``. NARROW: ``base`` is below 2**31.
    """
    if KIND == "whole tail" or KIND == "long tail" or KIND == "short tail" or KIND == "tail":
        columns = size.to(tl.uint32) * UNIT
        col = at.to(tl.uint32)
        if KIND == "short tail":
            col &= columns - 1
        else:  # once per program; the rest is computed only for the first element of every 16 bytes
            if NARROW:
                start = _remainder(base.to(tl.uint32), columns, multiplier, shift)
            else:
                start = (base % columns.to(tl.int64)).to(tl.uint32)
            if KIND == "whole tail":  # constant distances between the accesses of a thread
                return tl.load(bias_ptr + tl.multiple_of(start, UNIT) + at, mask=inside, other=0.0)
            col += start
        if KIND == "long tail":
            col = tl.minimum(col, col - columns)  # unsigned: a difference below 0 is the larger one
        if KIND == "tail":
            col = _remainder(col, columns, multiplier, shift)
        # Triton 3.9 infers this; 3.6 does not, and takes no hint on a minimum
        col = tl.max_contiguous(tl.multiple_of(col.to(tl.int64), UNIT), UNIT)
        return tl.load(bias_ptr + col, mask=inside, other=0.0)
    return tl.load(bias_ptr + base + at, mask=inside, other=0.0)  # "all"


@triton.jit
def _remainder(number, divisor, multiplier, shift):
    """Return number % divisor, uint32, by the results of ``_multiplier``: a fifth of the instructions of a division."""
    product = number.to(tl.uint64) * multiplier.to(tl.uint32, bitcast=True).to(tl.uint64)
    return number - ((product >> 32).to(tl.uint32) >> shift.to(tl.uint32)) * divisor


@triton.jit
def column_tile(
    step, n_rows, size,
    UNIT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return offsets (ROWS, COLS) in (n_rows, size * UNIT), which of them are inside, and the rows (ROWS,), 64-bit.

    EVEN: all are inside, as in ``flat_tile``.
    """
    first = tl.program_id(1).to(tl.int64) * (STEPS * ROWS) + step * ROWS
    row = first + tl.arange(0, ROWS)
    col = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    columns = size.to(tl.int64) * UNIT
    # the sum of what is computed once and a number of this step
    at = tl.arange(0, ROWS)[:, None] * columns + col[None, :] + first * columns
    inside = tl.full([1, COLS], 1, tl.int1)
    if not EVEN:
        inside = (row < n_rows)[:, None] & (col < columns)[None, :]
    return at, inside, row


@triton.jit
def store_sums(sums_ptr, sums, size, UNIT: tl.constexpr, COLS: tl.constexpr):
    """Add up the columns of ``sums`` (ROWS, COLS) and store them in this program's part of (parts, size * UNIT)."""
    columns = size.to(tl.int64) * UNIT
    col = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    tl.store(sums_ptr + tl.program_id(1) * columns + col, rounded(tl.sum(sums, axis=0), sums_ptr), mask=col < columns)


@triton.jit
def rounded(value, ptr):
    """Convert ``value`` to the dtype that ``ptr`` points to."""
    return value.to(ptr.dtype.element_ty)

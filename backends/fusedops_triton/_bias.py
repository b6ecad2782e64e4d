"""What kernels with a bias share: where in the bias an element finds its own, and sums over columns for its gradient.

x is seen as flat and contiguous, n elements; programs take tiles of BLOCK of them, whatever the length of a row. So
tiles are aligned and full for every shape, and a group of four elements that shares a Philox call is never torn.

The gradient of a bias (H,) is summed in two kernels, without atomics, so that the same input gives the same bits:

    1. with dx, in the same pass: a program owns COLS columns, walks down some rows, and leaves one row of sums
    2. the rows of sums, one for every 64 rows or more of x, are added up: 3 % of the bytes at most
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false
# Triton is not typed, and the body of a jit function is a language of its own that only looks like Python.

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops_triton._launch import Launch, by_layout
from fusedops_triton._settings import LARGEST_TILE, Columns, share_sums

# ---------------------------------------------------------------------------------------------------------- launchers


def unit(n: int) -> int:
    """The largest power of two, up to 16, that divides ``n``.

    Sizes go to a kernel as ``n // unit(n)`` and the constexpr UNIT, so that the compiler knows how rows are aligned. By
    itself Triton only sees whether 16 divides: rows of 1000 two-byte elements would be read two bytes at a time.
    """
    return min(n & -n, 16)


def wide(dtype: torch.dtype) -> tl.dtype:
    """The dtype of sums and functions."""
    return tl.float64 if dtype == torch.float64 else tl.float32


class Bias(NamedTuple):
    """A bias as ``bias_at`` reads it."""

    tensor: Tensor | None  # contiguous
    kind: str  # "none"; "all": one for each element of x; "tail" or "long tail": x's last dimensions; "other"
    unit: int
    sizes: tuple[int, int, int, int, int]  # size, inner, wrap, outer, step: see ``bias_at``

    @property
    def columns(self) -> int:
        """H of a bias that is (H,) to an x seen as (rows, H), else 0."""
        return self.sizes[0] * self.unit if self.kind in ("tail", "long tail") else 0


_NO_SIZES = (0, 0, 0, 0, 0)
_NO_BIAS = Bias(None, "none", 1, _NO_SIZES)


def locate(bias: Tensor | None, shape: torch.Size) -> Bias:
    """How ``bias`` lies beside an x of ``shape``, which is not empty and to which it broadcasts."""
    if bias is None:
        return _NO_BIAS
    kind, unit_of, sizes = _locate(bias.shape, shape)
    if kind == "all" and bias.numel() != shape.numel():
        bias = bias.expand(shape)  # and copied, at x's size
    return Bias(bias.contiguous(), kind, unit_of, sizes)


@by_layout
def _locate(bias: tuple[int, ...], shape: tuple[int, ...]) -> tuple[str, int, tuple[int, int, int, int, int]]:
    """Kind, unit and sizes, as ``Bias`` has them, from the two shapes."""
    size = math.prod(bias)
    if size == math.prod(shape):
        return "all", 1, _NO_SIZES
    # Neighbouring dimensions of x that are all in the bias, or all not, are one: [(kept, size), ...], outermost first.
    groups: list[tuple[bool, int]] = []
    for full, own in zip(shape, (1,) * (len(shape) - len(bias)) + bias):
        if full > 1:
            kept = own > 1
            last = groups.pop() if groups and groups[-1][0] == kept else (kept, 1)
            groups.append((kept, last[1] * full))
    kept = [at for at, group in enumerate(groups) if group[0]]
    if not kept or kept == [len(groups) - 1]:
        if size >= 2**31:  # bias_at has 32-bit columns
            return "other", 1, (size, 1, 1, 1, 0)
        kind = "long tail" if size >= LARGEST_TILE else "tail"  # a tile meets the end of such a row once at most
        return kind, unit(size), (size // unit(size), 0, 0, 0, 0)
    if len(kept) > 2:  # (a, 1, b, 1, c): nobody's bias. A copy of x's size, for the sake of simple kernels
        return "all", 1, _NO_SIZES
    # One kept group of b: (i // inner) % b. Two, a and b: (i // outer % a) * b + (i // inner) % b.
    inner, b = _product(groups[kept[-1] + 1 :]), groups[kept[-1]][1]
    wrap, outer = (groups[kept[0]][1], _product(groups[kept[0] + 1 :])) if len(kept) == 2 else (1, 1)
    return "other", 1, (b, inner, wrap, outer, b if len(kept) == 2 else 0)


def _product(groups: list[tuple[bool, int]]) -> int:
    return math.prod([size for _, size in groups])


def summed(du: Tensor, bias: Tensor) -> Tensor:
    """The gradient of a bias that has no ``columns``, from du, an element's own: slower, as du was made for it."""
    return du.sum_to_size(bias.shape).to(bias.dtype)


def sums_for(columns: Columns, bias: Tensor, dtype: tl.dtype) -> tuple[Tensor, Tensor]:
    """The gradient of a bias, to be filled, and the tensor (parts, H) for sums: the same one if there is one part."""
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    if columns.parts == 1:
        return dbias, dbias
    sums = torch.float64 if dtype == tl.float64 else torch.float32
    return dbias, torch.empty((columns.parts, bias.numel()), dtype=sums, device=bias.device)


def add_sums(dbias: Tensor, sums: Tensor) -> None:
    """``dbias = sums.sum(0)``, always in the same order."""
    _sums_launch(*sums.shape)(dbias, dbias, sums)


@by_layout
def _sums_launch(parts: int, size: int) -> Launch:
    share = share_sums(parts, size)
    constants = {"STEPS": share.steps, "ROWS": share.rows, "COLS": share.cols}
    return Launch(_add_sums, (share.tiles,), (parts, size), constants, share.warps)


# ------------------------------------------------------------------------------------------------------------ kernels


@triton.jit(do_not_specialize=["parts"])
def _add_sums(
    dbias_ptr, sums_ptr, parts, size, STEPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """COLS columns of sums (parts, size), over all its parts <= STEPS * ROWS. Grid (cdiv(size, COLS),)."""
    col = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    total = tl.zeros([ROWS, COLS], dtype=sums_ptr.dtype.element_ty)
    for step in range(STEPS):
        part = step * ROWS + tl.arange(0, ROWS)
        inside = (part < parts)[:, None] & (col < size)[None, :]
        total += tl.load(sums_ptr + part.to(tl.int64)[:, None] * size + col[None, :], mask=inside, other=0.0)
    tl.store(dbias_ptr + col, rounded(tl.sum(total, axis=0), dbias_ptr), mask=col < size)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def flat_tile(n, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """The first element of this program (64-bit), its elements from there, and which of them are inside n * UNIT."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    return base, at, at < n.to(tl.int64) * UNIT - base


@triton.jit
def bias_at(bias_ptr, base, at, inside, size, inner, wrap, outer, step, KIND: tl.constexpr, UNIT: tl.constexpr):
    """The bias of elements base + at, which ``locate`` says how to find."""
    if KIND == "tail" or KIND == "long tail":
        # one 64-bit division a program. What follows is computed for the first element of every 16 bytes alone
        columns = size.to(tl.int64) * UNIT
        col = (base % columns).to(tl.uint32) + at.to(tl.uint32)
        columns = columns.to(tl.uint32)
        col = tl.where(col >= columns, col - columns, col) if KIND == "long tail" else col % columns
        col = tl.max_contiguous(tl.multiple_of(col, UNIT), UNIT)  # Triton 3.9 sees it by itself, 3.6 does not
        return tl.load(bias_ptr + col, mask=inside, other=0.0)
    if KIND == "all":
        return tl.load(bias_ptr + base + at, mask=inside, other=0.0)
    index = base + at
    return tl.load(bias_ptr + index // outer % wrap * step + index // inner % size, mask=inside, other=0.0)


@triton.jit
def column_tile(step, n_rows, size, UNIT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Offsets (ROWS, COLS) in (n_rows, size * UNIT), which of them are inside, and the first row (all 64-bit)."""
    first = tl.program_id(1).to(tl.int64) * (STEPS * ROWS) + step * ROWS
    row = first + tl.arange(0, ROWS)
    col = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    columns = size.to(tl.int64) * UNIT
    inside = (row < n_rows)[:, None] & (col < columns)[None, :]
    return row[:, None] * columns + col[None, :], inside, row


@triton.jit
def store_sums(sums_ptr, sums, size, UNIT: tl.constexpr, COLS: tl.constexpr):
    """The columns of ``sums`` (ROWS, COLS), added up, to this program's place in (parts, size * UNIT)."""
    columns = size.to(tl.int64) * UNIT
    col = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    tl.store(sums_ptr + tl.program_id(1) * columns + col, rounded(tl.sum(sums, axis=0), sums_ptr), mask=col < columns)


@triton.jit
def rounded(value, ptr):
    """``value`` in the dtype that ``ptr`` points to. From float64 to 16 bits by way of float32, as torch does it."""
    if value.dtype == tl.float64 and ptr.dtype.element_ty.primitive_bitwidth == 16:
        value = value.to(tl.float32)
    return value.to(ptr.dtype.element_ty)

"""The products of experts with the rows of x where they are, and their activation, in one launch.

    sorted     A program computes a tile of the activation of one expert's rows, which it reads by the order of the
               route: x is not copied, and the up-projections are written only where they are saved.
    few        For a few tokens: a program finds the rows of its expert itself, without a route, and the results are in
               the order of the routed rows. The products with down are by it too.

Gate and up of an element are in one tile: its columns are both by turns, eight by eight where they are the halves of a
row, so that a thread has the sums of both, and reads 16 bytes where the columns of a weight are next to each other.
There is one product for a tile, as of Triton's matmuls: two with the same rows are among those that Triton 3.6 may
order wrongly on Hopper (triton-lang/triton#11047).
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.ops.experts.formulas import Activation
from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import read
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.experts._expert_activation import Kind, activated_rows, kind_of, write_rows
from fusedops_triton.experts._expert_rows import Route, experts_at
from fusedops_triton.experts._grouped import LARGE, SMALL, Tiles, constants_of, expert_of_tile, in_order, products
from fusedops_triton.launch import settings
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div, power_of_two

#: Of a few rows. A tile of 16 rows is the smallest that tensor cores take; 32 columns of 128 elements are 8 KB of 16
#: bits, of which two are read ahead, for each of the programs on a processor.
_FEW, _FEW_WIDE = Tiles(16, 32, 128, 4), Tiles(16, 32, 32, 4)
FEW_TOKENS, _FEW_ROWS = 32, 512


# ---------------------------------------------------------------------------------------------------------- launchers


def up_projection(
    x: Tensor, of: Route, up: Tensor, bias: Tensor | None, swapped: bool, act: Activation, save: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the activation of the sorted rows, (S, I), and with ``save`` the up-projections, (S, 2I or I).

    Args:
        x: (T, H), contiguous.
        of: the route of T * K rows.
        up: (E, H, 2I or I); ``swapped``: its last two dims swapped.
        bias: (E, 2I or I), contiguous, or None.
        swapped: see ``up``.
        act: the activation.
        save: True also returns the up-projections, with the bias, and 0 for rows without an expert.
    """
    kind, numbers = kind_of(act)
    n_rows, width = of.order.shape[0], up.shape[1 if swapped else 2]
    a = x.new_empty((n_rows, width // 2 if act.gated else width))
    h = x.new_empty((n_rows, width)) if save else None
    if width:
        dtype = torch.promote_types(x.dtype, up.dtype)
        up, swapped = in_order(up, swapped)
        sizes = (n_rows, up.shape[0], of.place.shape[1], a.shape[1], x.shape[1])
        launch = _sorted_launch(*sizes, swapped, dtype, kind, save)
        launch(a, a, h, x, up, bias, of.order, of.ends, *numbers)
    return a, h


@cached_by_layout
def _sorted_launch(
    n_rows: int, experts: int, choices: int, size: int, length: int, swapped: bool, dtype: torch.dtype, kind: Kind,
    save: bool,
) -> Launch:  # fmt: skip
    common, gated = unit(gcd(size, length)) or 1, kind.layout != "gate"
    tiles = LARGE if dtype.itemsize == 2 and common >= 8 else SMALL
    wide = settings.chip == settings.CHIPS["sm_90"] and kind.function in ("swish", "clamped")
    if gated and tiles is LARGE and wide:
        tiles = tiles._replace(n=2 * tiles.n)  # 144 KB of shared memory; on sm_100, and with GELU, it spills
    cols = tiles.n // 2 if gated else tiles.n
    across, groups = ceil_div(size, cols), experts + save  # rows without an expert are written too
    constants = {
        "KIND": kind.function, "LAYOUT": kind.layout, "SWAPPED": swapped, "EVEN": length % tiles.k == 0,
        "UNIT": common, "STEPS": (groups - 1).bit_length(), "COLS": cols, **constants_of(_sorted, dtype, tiles),
    }  # fmt: skip
    del constants["BN"]
    sizes = (n_rows, experts, groups, choices, size // common, length // common, across)
    return Launch(_sorted, ((n_rows // tiles.m + groups) * across,), sizes, constants, tiles.warps)


def takes_few(index: Tensor) -> bool:
    """Return True for the numbers of rows for which ``few_rows`` is."""
    return index.shape[0] <= FEW_TOKENS and index.numel() <= _FEW_ROWS


def few_rows(
    rows: Tensor,
    index: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    swapped: bool,
    act: Activation | None,
    place: Tensor | None,
) -> Tensor:
    """Return the products of the rows with the weight of their experts, and the activation of that, (T * K, N).

    Args:
        rows: (T, L), or (T * K, L), contiguous.
        index: (T, K), contiguous.
        weight: (E, L, 2N or N); ``swapped``: its last two dims swapped.
        bias: (E, 2N or N), contiguous, or None.
        swapped: see ``weight``.
        act: the activation, or None.
        place: (T, K), int32, written: the row of each choice in the result, -1 for a sentinel. Or None.
    """
    kind, numbers = (Kind("none", "gate"), (0.0, 1.0, 0.0)) if act is None else kind_of(act)
    width = weight.shape[1 if swapped else 2]
    y = rows.new_empty((index.numel(), width // 2 if kind.layout != "gate" else width))
    if y.numel():
        dtype = torch.promote_types(rows.dtype, weight.dtype)
        per_row = index.numel() // rows.shape[0]
        weight, swapped = in_order(weight, swapped)
        launch = _few_launch(index.numel(), weight.shape[0], per_row, y.shape[1], rows.shape[1], swapped, dtype, kind)
        launch(y, y, rows, weight, bias, index, place, *numbers)
    return y


@cached_by_layout
def _few_launch(
    n_rows: int, experts: int, per_row: int, size: int, length: int, swapped: bool, dtype: torch.dtype, kind: Kind
) -> Launch:
    common = unit(gcd(size, length)) or 1
    tiles = _FEW if dtype.itemsize == 2 and common >= 8 else _FEW_WIDE
    cols = tiles.n // 2 if kind.layout != "gate" else tiles.n
    across, by_expert = ceil_div(size, cols), n_rows > experts
    constants = {
        "KIND": kind.function, "LAYOUT": kind.layout, "BY_EXPERT": by_expert, "SWAPPED": swapped,
        "EVEN": length % tiles.k == 0, "UNIT": common, "ROWS": power_of_two(n_rows), "COLS": cols,
        **constants_of(_few, dtype, tiles),
    }  # fmt: skip
    del constants["BN"]
    sizes = (n_rows, experts, per_row, size // common, length // common, across)
    return Launch(_few, (min(n_rows, experts) * across,), sizes, constants, tiles.warps)


# ------------------------------------------------------------------------------------------------------ jit functions


@profiled(do_not_specialize=["limit", "alpha", "offset", "n_rows", "experts", "groups", "size", "length", "across"])
def _sorted(
    a_ptr, h_ptr, x_ptr, weight_ptr, bias_ptr, order_ptr, ends_ptr, limit, alpha, offset,
    n_rows, experts, groups, choices, size, length, across,
    KIND: tl.constexpr, LAYOUT: tl.constexpr, SWAPPED: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr,
    STEPS: tl.constexpr, COLS: tl.constexpr, OF: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute BM * COLS elements. Grid (tiles * across,), with as many tiles as there may be. size, length: over UNIT.

    groups: experts, or one more, which is of the rows without an expert: their up-projections are 0.
    """
    size, length = size * UNIT, length * UNIT
    tile, first = tl.program_id(0) // across, (tl.program_id(0) % across) * COLS
    expert, first_row = expert_of_tile(ends_ptr, tile, groups, STEPS, BM)
    end = tl.load(ends_ptr + expert, expert < experts, n_rows)
    if first_row < end:
        m = first_row + tl.arange(0, BM)
        there = m < end
        token = tl.load(order_ptr + m, there, 0) // choices
        column, inside = _columns(first, size, LAYOUT, COLS)
        lines = x_ptr + token.to(tl.int64)[:, None] * length
        outputs = size if LAYOUT == "gate" else 2 * size
        reach, known = tl.where(expert < experts, length, 0), m < tl.where(expert < experts, end, 0)
        expert = tl.minimum(expert, experts - 1)
        weight = weight_ptr + expert.to(tl.int64) * outputs * length
        total = products(lines, there, weight, column, inside, outputs, length, reach, SWAPPED, EVEN, OF, BK)
        _finish(
            a_ptr, h_ptr, bias_ptr, total, m.to(tl.int64), expert, known, there, first, size,
            limit, alpha, offset, KIND, LAYOUT, COLS,
        )  # fmt: skip


@profiled(do_not_specialize=["limit", "alpha", "offset", "n_rows", "experts", "size", "length", "across"])
def _few(
    y_ptr, rows_ptr, weight_ptr, bias_ptr, index_ptr, place_ptr, limit, alpha, offset,
    n_rows, experts, per_row, size, length, across,
    KIND: tl.constexpr, LAYOUT: tl.constexpr, BY_EXPERT: tl.constexpr, SWAPPED: tl.constexpr, EVEN: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, OF: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute COLS columns of the rows of an expert. Grid (experts * across,), or (n_rows * across,) for fewer rows
    than experts: then the first row of an expert computes all of them.

    per_row: routed rows of a row of ``rows_ptr``. size, length: over UNIT.
    """
    size, length = size * UNIT, length * UNIT
    group, first = tl.program_id(0) // across, (tl.program_id(0) % across) * COLS
    at = tl.arange(0, ROWS)
    each = experts_at(index_ptr, at, n_rows, experts)
    if place_ptr is not None:
        tl.store(place_ptr + at, tl.where(each == experts, -1, at), at < tl.where(tl.program_id(0) == 0, n_rows, 0))
    expert = group if BY_EXPERT else tl.sum(tl.where(at == group, each, 0), 0)
    hit = each == tl.where(expert < experts, expert, -2)
    count = tl.sum(hit.to(tl.int32), 0)
    if not BY_EXPERT:
        count = tl.where(tl.min(tl.where(hit, at, ROWS), 0) == group, count, 0)
    if count > 0:
        upto = tl.cumsum(hit.to(tl.int32), 0)
        column, inside = _columns(first, size, LAYOUT, COLS)
        outputs = size if LAYOUT == "gate" else 2 * size
        weight = weight_ptr + expert.to(tl.int64) * outputs * length
        for start in range(0, count, BM):
            turn = start + tl.arange(0, BM)
            row = tl.sum((upto[None, :] <= turn[:, None]).to(tl.int32), 1)  # the rows before it
            there = turn < count
            lines = rows_ptr + (row // per_row).to(tl.int64)[:, None] * length
            total = products(lines, there, weight, column, inside, outputs, length, length, SWAPPED, EVEN, OF, BK)
            _finish(
                y_ptr, None, bias_ptr, total, row.to(tl.int64), expert, there, there, first, size,
                limit, alpha, offset, KIND, LAYOUT, COLS,
            )  # fmt: skip


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def _columns(first, size, LAYOUT: tl.constexpr, COLS: tl.constexpr):
    """Return the columns of a tile in the up-projections, and True where they exist. first: of the activation."""
    if LAYOUT == "gate":
        column = first + tl.arange(0, COLS)
        inside = column < size
    elif LAYOUT == "pairs":
        column = 2 * first + tl.arange(0, 2 * COLS)
        inside = column < 2 * size
    else:
        both = tl.arange(0, 2 * COLS)  # eight of gate, eight of up
        column = first + both // 16 * 8 + both % 8
        inside = column < size
        column += both // 8 % 2 * size
    return column, inside


@triton.jit
def _finish(
    a_ptr, h_ptr, bias_ptr, total, row, expert, known, there, first, size, limit, alpha, offset,
    KIND: tl.constexpr, LAYOUT: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Add the bias to a tile of up-projections, and write them and their activation."""
    rows: tl.constexpr = total.shape[0]
    if bias_ptr is not None:
        outputs = size if LAYOUT == "gate" else 2 * size
        columns, fits = _columns(first, size, LAYOUT, COLS)
        bias = read(bias_ptr + expert.to(tl.int64) * outputs + columns, fits)
        total = tl.where(known[:, None], total + bias[None, :], 0.0)
    if LAYOUT == "gate":
        gate, up = total, tl.full(total.shape, 1.0, tl.float32)
    elif LAYOUT == "pairs":
        gate, up = tl.split(tl.reshape(total, [rows, COLS, 2]))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(total, [rows, COLS // 8, 2, 8]), [0, 1, 3, 2]))
        gate, up = tl.reshape(gate, [rows, COLS]), tl.reshape(up, [rows, COLS])
    column = first + tl.arange(0, COLS)
    inside = column < size
    if h_ptr is not None:
        write_rows(h_ptr, gate, up, row, there, first, size.to(tl.int64), LAYOUT, COLS)
    a = gate if KIND == "none" else activated_rows(gate, up, limit, alpha, offset, KIND)
    to = a_ptr + row[:, None] * size + column[None, :]
    tl.store(to, rounded(a, a_ptr), known[:, None] & inside[None, :])

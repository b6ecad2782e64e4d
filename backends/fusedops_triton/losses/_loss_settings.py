"""The launch settings of the losses: of their rows of classes. ``launch/settings.py`` has what all kernels share."""

from __future__ import annotations

from fusedops_triton.launch.settings import (
    FLAT_PER_THREAD,
    ROW_PER_THREAD,
    SHORT_ROWS,
    SHORT_TILE,
    Plan,
    Tile,
    power_of_two,
    tile,
    warps_for,
)

#: Columns of a block of a long row: two 16-byte accesses of two-byte elements by each of four warps. 16 programs with
#: 32 registers per thread fit on a multiprocessor, so some read while others are at the end of a row.
LOSS_TILE = 2048


def class_tile(padded: int, element_size: int) -> Tile:
    """Return the setting for rows of ``padded`` logits, which a program reads in blocks, and writes in place."""
    block = min(power_of_two(padded), LOSS_TILE)
    return Tile(block, warps_for(block, ROW_PER_THREAD[element_size] // 2))


def loss_plan(size: int, element_size: int) -> Plan:
    """Return the default setting of cross entropy's forward for rows of ``size`` logits.

    It reads each row once, so nothing is gained by a row on chip. Short rows are read whole, by a warp or two, several
    of the shortest at a time; longer ones go through in blocks.
    """
    width, block = power_of_two(size), LOSS_TILE
    if width > block:
        return Plan(1, block, warps_for(block, ROW_PER_THREAD[element_size] // 2), False)
    rows = min(max(1, SHORT_TILE // width), SHORT_ROWS)
    return Plan(rows, width, warps_for(rows * width, ROW_PER_THREAD[element_size] // (2 if rows > 1 else 1)), True)


def loss_group(setting: Plan, element_size: int) -> int:
    """Return the columns that have a maximum and a sum of their own: those of one access; of a whole row, all."""
    return setting.block if setting.on_chip else 16 // element_size


def loss_gradient_plan(size: int, element_size: int) -> Plan:
    """Return the default setting of cross entropy's backward, which computes each element by itself.

    A block of columns is a flat tile of one row: with one input and one result, two 16-byte loads are in flight. Many
    programs share a row, so that a few rows fill a GPU too.
    """
    block, warps = tile(element_size)
    width = power_of_two(size)
    if width >= block:
        return Plan(1, block, warps, False)
    rows = min(block // width, SHORT_ROWS)
    return Plan(rows, width, warps_for(rows * width, FLAT_PER_THREAD[element_size]), True)

"""Launch settings: how many rows, columns and warps a program gets, by width, element size and chip. All of them here.

They follow from limits of the chips: registers, threads, 16-byte accesses, bytes in flight. That they keep those limits
on sm_80, sm_90, sm_100 and gfx942 is checked on what the compiler makes (tests/test_triton_compile.py: nothing spills).
That they are the fastest within the limits was not measured, except where an entry says so: where it matters,
FUSEDOPS_AUTOTUNE=1 lets a GPU try their neighbours (``_autotune.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Chip(NamedTuple):
    """What settings depend on."""

    lanes: int  # threads of a warp, of a wave on AMD
    threads: int  # the most of a program: the limit of a CUDA block and of a HIP workgroup


#: The chips that the kernels are compiled for in the tests. Other NVIDIA GPUs get sm_90's settings, other AMD ones
#: gfx942's: on RDNA, where a wave has 32 lanes, programs get half the threads they could have: slower, still right.
#: The numbers below are one set for all. At 1024 threads an NVIDIA thread has 64 registers on each chip here; a lane of
#: gfx942 has 128, so rows twice as wide would fit there: not measured, so not done.
CHIPS = {
    "sm_80": Chip(lanes=32, threads=1024),
    "sm_90": Chip(lanes=32, threads=1024),
    "sm_100": Chip(lanes=32, threads=1024),
    "gfx942": Chip(lanes=64, threads=1024),
}

#: The chip of this process; one build of torch serves one vendor.
chip = CHIPS["sm_90" if torch.version.hip is None else "gfx942"]


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n`` (``n`` >= 1). Triton's blocks have no other sizes."""
    return 1 << (n - 1).bit_length()


def ceil_div(n: int, by: int) -> int:
    """``n / by``, rounded up."""
    return -(-n // by)


def warps_for(elements: int, each: int) -> int:
    """Warps for a program of ``elements`` elements (a power of two) with ``each`` of them in every thread."""
    return min(max(elements // each, chip.lanes), chip.threads) // chip.lanes


# ------------------------------------------------------------------------------------------------------ rows (softmax)


class Plan(NamedTuple):
    """How rows of one width are shared out among programs."""

    rows: int  # rows of a program
    block: int  # columns that it holds at a time
    warps: int
    on_chip: bool  # a whole row at once


#: Elements in each thread, by element size. 32 two-byte elements are four 16-byte loads in flight: with 1024 threads
#: 64 KB for a multiprocessor, where 3.3 TB/s times 600 ns of latency is 15 KB for each of an H100's 132. As float32
#: they take 32 of the 64 registers that a thread has when there are 1024. Doubles take two registers each.
ROW_EACH = {2: 32, 4: 32, 8: 16}

#: Elements of a program that holds several short rows: one warp of them. And rows: each has 64-bit offsets in registers
#: (1024 rows of one column took all 255 and spilled).
SHORT_TILE = 1024
SHORT_ROWS = 128

#: The widest row on chip, by element size. At twice the width 1024 threads, 64 registers each, spill 48 to 520 bytes a
#: thread on sm_90 (tests/test_triton_compile.py). Backward holds two inputs where forward holds one.
FORWARD_ON_CHIP = {2: 32768, 4: 32768, 8: 16384}
BACKWARD_ON_CHIP = {2: 16384, 4: 16384, 8: 8192}

#: Elements that a program of the kernels for longer rows has in flight, by element size: half of what a program on chip
#: holds with as many threads, so that two share a multiprocessor and one computes while the other waits.
LONG_TILE = {2: 8192, 4: 8192, 8: 4096}


def plan(size_k: int, element_size: int, inputs: int) -> Plan:
    """How to cover rows of ``size_k`` elements, of ``inputs`` tensors at once (forward 1, backward 2)."""
    width = power_of_two(size_k)
    each = ROW_EACH[element_size]
    if width > (FORWARD_ON_CHIP if inputs == 1 else BACKWARD_ON_CHIP)[element_size]:
        tile = LONG_TILE[element_size]
        return Plan(1, tile // inputs, warps_for(tile, each // 2), False)
    rows = min(max(1, SHORT_TILE // width), SHORT_ROWS)
    return Plan(rows, width, warps_for(rows * width, each), True)


# ----------------------------------------------------------------------------------------- flat tiles (ops with a bias)


class Tile(NamedTuple):
    """Elements of a program, a power of two, and its warps."""

    block: int
    warps: int


#: Elements in each thread, by element size: two 16-byte loads of each tensor in flight. And threads of a program: four
#: warps, of which 16 fit on a multiprocessor with 32 registers a thread; 2048 * 32 bytes in flight there is twice
#: what an H200's 4.8 TB/s * 800 ns / 132 needs.
FLAT_EACH = {2: 16, 4: 8, 8: 4}
FLAT_THREADS = 128

#: No tile is larger: ``bias_at`` relies on it.
LARGEST_TILE = max(FLAT_EACH.values()) * FLAT_THREADS


def tile(narrowest: int) -> Tile:
    """For tensors whose ``narrowest`` element has so many bytes: 16-byte accesses also of that tensor."""
    each = FLAT_EACH[narrowest]
    return Tile(each * FLAT_THREADS, warps_for(each * FLAT_THREADS, each))


# ------------------------------------------------------------------------------------ columns (the gradient of a bias)


class Columns(NamedTuple):
    """How sums over columns are shared out: ``tiles`` * ``parts`` programs of ``steps`` tiles of rows * cols each."""

    rows: int
    cols: int
    steps: int
    tiles: int
    parts: int
    warps: int


#: Bytes of a row in a tile: one warp's 16-byte loads. And rows, as each has its 64-bit offset in registers.
ROW_BYTES = 512
MOST_ROWS = 128

#: Rows of x for each row of sums: at least 64, so that writing and reading the sums is 8 / (6 * 64) = 2 % of what
#: bias_gelu moves for two-byte elements, 3 % for dropout. Where that makes too few programs to fill a GPU, tensors are
#: small enough for sums never to leave the L2 cache, and 16 rows will do.
PART_ROWS = 64
SMALL_PART_ROWS = 16
FULL_GPU = 512

#: Programs that are enough: eight for each place on an H200, so that the last, half-filled round is a small share.
ENOUGH = 8192
MOST_PARTS = 1024


def share_columns(n_rows: int, size: int, narrowest: int) -> Columns:
    """How to sum the columns of tensors (n_rows, size), the ``narrowest`` of which has elements of so many bytes.

    The order of a sum follows from it, and so its bits: it is never tuned.
    """
    block, warps = tile(narrowest)
    cols = min(power_of_two(size), ROW_BYTES // narrowest)
    rows = min(block // cols, MOST_ROWS)
    tiles = ceil_div(size, cols)
    parts = min(ceil_div(n_rows, PART_ROWS), ceil_div(ENOUGH, tiles), MOST_PARTS)
    if parts * tiles < FULL_GPU:
        parts = min(ceil_div(n_rows, SMALL_PART_ROWS), ceil_div(FULL_GPU, tiles))
    # a power of two, and compile-time: few variants, and loops that the interpreter can run with any NumPy
    steps = power_of_two(ceil_div(ceil_div(n_rows, parts), rows))
    return Columns(rows, cols, steps, tiles, ceil_div(n_rows, steps * rows), min(warps, rows * cols // 32 or 1))


#: ``add_sums``: elements of a program, rows of sums that it takes at a time, and columns at least.
SUM_TILE = 1024
SUM_ROWS = 256
SUM_COLS = 16


def share_sums(parts: int, size: int) -> Columns:
    """How to add up sums (parts, size). Programs own few columns: a narrow bias has to make many of them too."""
    rows = min(power_of_two(parts), SUM_ROWS)
    cols = max(SUM_TILE // rows, SUM_COLS)
    steps = power_of_two(ceil_div(parts, rows))
    return Columns(rows, cols, steps, ceil_div(size, cols), 1, warps_for(rows * cols, 8))


# --------------------------------------------------------------------------------------------------------- neighbours


def neighbours(setting: Plan | Tile) -> list[Plan | Tile]:
    """What autotuning tries beside ``setting``: half and twice the warps, the rows or the block."""
    found: list[Plan | Tile] = [setting._replace(warps=warps) for warps in (setting.warps // 2, setting.warps * 2)]
    if isinstance(setting, Tile) or not setting.on_chip:
        found += [setting._replace(block=block) for block in (setting.block // 2, setting.block * 2)]
    elif setting.rows > 1:
        found += [setting._replace(rows=rows) for rows in (setting.rows // 2, setting.rows * 2)]
    return [one for one in found if _possible(one)]


def _possible(setting: Plan | Tile) -> bool:
    if not 1 <= setting.warps <= chip.threads // chip.lanes:
        return False
    if isinstance(setting, Tile):
        return setting.block <= LARGEST_TILE
    return setting.rows <= SHORT_ROWS

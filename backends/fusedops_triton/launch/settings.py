"""Launch settings: the rows, columns and warps of a program, by row width, element size and chip.

Those of norms and losses are in files of their own (``_norm_settings.py``, ``_loss_settings.py``). They follow from the
resources of the chips (``chips.py``): registers, threads, processors, 16-byte accesses, bytes in flight. The tests
compile the kernels for sm_80, sm_90, sm_100 and gfx942 and check that they fit (test_triton_compile.py: no
register spills). Unless a comment gives a measurement, it was not measured that a setting is the fastest one that fits.
``python -m benchmarks.settings`` measures the settings beside them on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from fusedops_triton.launch.chips import CHIPS, this_target


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n`` (``n`` >= 1). The sizes of Triton's blocks are such."""
    return 1 << (n - 1).bit_length()


#: The chip of this process; one build of torch serves one vendor.
chip = CHIPS[this_target()]


def chains_products() -> bool:
    """Return True where a product may be added to the sum of the one before it: not with Triton 3.6 to 3.8 on 10.3.

    There, of two products into one accumulator in a loop, the sum is wrong (triton-lang/triton#10821).
    """
    return chip != CHIPS["sm_100"]


#: Registers of a thread with which half of the threads of an NVIDIA processor are resident, 65536 / 1024 on each of
#: them. Some compiled kernels take more without need, to load earlier.
HALF_RESIDENT = 64


def ceil_div(n: int, by: int) -> int:
    """Return ``n / by``, rounded up."""
    return -(-n // by)


def warps_for(elements: int, per_thread: int) -> int:
    """Return the warps of a program of ``elements`` elements (a power of two), ``per_thread`` of them per thread."""
    return min(max(elements // per_thread, chip.lanes), chip.threads) // chip.lanes


# ------------------------------------------------------------------------------------------------------ rows (softmax)


class Plan(NamedTuple):
    """The setting of a kernel that works on whole rows."""

    rows: int  # rows per program
    block: int  # columns that a program holds at a time
    warps: int
    on_chip: bool  # the program holds whole rows
    registers: int | None = None  # of a thread, at most; None: any


#: Elements per thread, by element size. 32 two-byte elements are four 16-byte loads in flight. With 1024 threads this
#: is 64 KB per multiprocessor; 3.3 TB/s times 600 ns of latency is 15 KB for each of the 132 multiprocessors of an
#: H100. As float32, the elements take 32 of the 64 registers that a thread has with 1024 threads.
ROW_PER_THREAD = {2: 32, 4: 32}

#: Elements of a program that holds several short rows, which is one warp, and its maximum number of rows. Each row has
#: 64-bit offsets in registers: 1024 rows of one column took all 255 registers and spilled.
SHORT_TILE = 1024
SHORT_ROWS = 128

#: The widest row on chip, by element size. At twice the width, 1024 threads with 64 registers each spill 48 to 520
#: bytes per thread on sm_90 (test_triton_compile.py). Backward holds two inputs, forward one.
FORWARD_ON_CHIP = {2: 32768, 4: 32768}
BACKWARD_ON_CHIP = {2: 16384, 4: 16384}

#: Elements that a program of the kernels for longer rows has in flight, by element size. This is half of what a program
#: on chip holds with the same threads, so two programs share a multiprocessor and one computes while the other waits.
LONG_TILE = {2: 8192, 4: 8192}


def plan(size_k: int, element_size: int, inputs: int) -> Plan:
    """Return the default setting for rows of ``size_k`` elements of ``inputs`` tensors (forward 1, backward 2)."""
    width = power_of_two(size_k)
    per_thread = ROW_PER_THREAD[element_size]
    if width > (FORWARD_ON_CHIP if inputs == 1 else BACKWARD_ON_CHIP)[element_size]:
        tile = LONG_TILE[element_size]
        return Plan(1, tile // inputs, warps_for(tile, per_thread // 2), False)
    rows = min(max(1, SHORT_TILE // inputs // width), SHORT_ROWS)
    return Plan(rows, width, warps_for(rows * width, per_thread // inputs), True)


#: The widest row of two-byte elements on chip as pairs (``_softmax_packed.py``), forward and backward: 128 KB, half of
#: the registers.
PACKED_ON_CHIP = {1: 65536, 2: 32768}

#: Rows above this width go as pairs where they can, by the number of inputs. On an H200, in percent of the speed of a
#: copy, without pairs and with them: forward 78 and 92 at 32768 columns, 95 and 90 at 16384; backward 95 and 102 at
#: 32768, 99 and 103 at 16384, 105 and 103 at 8192. A B200, whose memory is faster, needs more programs that wait for
#: it: half of the width, which no B200 has run.
PACKED_ABOVE = {1: 16384, 2: 8192}

#: Accesses of 16 bytes that a thread has of a row of the next power of two: 64 registers of pairs, of one input or two.
PACKED_PARTS = {1: 16, 2: 8}


class Packed(NamedTuple):
    """The setting of a kernel that holds a row as pairs."""

    parts: int  # of a row; a thread has one access of each
    columns: int  # of a part
    warps: int


def packed_plan(size_k: int, element_size: int, inputs: int) -> Packed | None:
    """Return the setting for a row as pairs; None where it does not fit, or where ``plan`` is the better one."""
    above = PACKED_ABOVE[inputs] // (2 if chip == CHIPS["sm_100"] else 1)
    if element_size != 2 or size_k % 8 or not above < size_k <= PACKED_ON_CHIP[inputs]:
        return None
    columns = power_of_two(size_k) // PACKED_PARTS[inputs]
    return Packed(ceil_div(size_k, columns), columns, warps_for(columns, 8))


# ----------------------------------------------------------------------------------------- flat tiles (ops with a bias)


class Tile(NamedTuple):
    """The setting of a kernel that works on flat tensors."""

    block: int  # elements per program, a power of two
    warps: int


#: Elements per thread, by element size: two 16-byte loads of each tensor in flight. And threads per program: four
#: warps. 16 programs fit on a multiprocessor with 32 registers per thread. 2048 threads * 32 bytes in flight is twice
#: what the 4.8 TB/s * 800 ns / 132 of an H200 need.
FLAT_PER_THREAD = {2: 16, 4: 8}
FLAT_THREADS = 128

#: The largest tile. ``bias_at`` depends on it.
LARGEST_TILE = max(FLAT_PER_THREAD.values()) * FLAT_THREADS


def tile(narrowest: int) -> Tile:
    """Return the default setting for tensors whose narrowest dtype has ``narrowest`` bytes per element.

    Accesses of the tensor with that dtype are 16 bytes wide too.
    """
    per_thread = FLAT_PER_THREAD[narrowest]
    return Tile(per_thread * FLAT_THREADS, warps_for(per_thread * FLAT_THREADS, per_thread))


def dropout_tile(narrowest: int) -> Tile:
    """Return the default setting of dropout without a residual, as ``tile``, with twice the elements per thread.

    Once, each thread computes the keys of the ten rounds of Philox, and the remainder that places its bias.
    """
    block, warps = tile(narrowest)
    return Tile(block, max(warps // 2, 1))


#: Bytes of a part of a row that a tile of a gated activation has, at least, where longer ones would leave a rest.
GATED_BYTES = 512


def gated_tile(narrowest: int, backward: bool) -> Tile:
    """Return the default setting of a gated activation, as ``tile`` does for one input.

    Backward has three inputs and two results: with half the elements per thread, three 16-byte loads are in flight, and
    the results fit in the registers.
    """
    per_thread = FLAT_PER_THREAD[narrowest] // (2 if backward else 1)
    return Tile(per_thread * FLAT_THREADS, FLAT_THREADS // chip.lanes)


def gated_columns(width: int, block: int, narrowest: int) -> int:
    """Return the columns of a tile of ``block`` elements of rows of ``width`` elements, a power of two.

    Tiles of 2048 columns would have an eighth of their elements beyond rows of 11008, which 43 tiles of 256 fill.
    """
    return min(power_of_two(width), block, max(width & -width, GATED_BYTES // narrowest))


#: Heads whose rows of one position a program has, at most: cos and sin are loaded once for this many heads. In
#: float32 they have twice the bytes of a row of two-byte elements: with 4 heads, half a byte is read there for each
#: byte from memory, and with 1, two.
ROTARY_HEADS = 4


#: Pairs per thread, by element size. In float32 two 16-byte loads of each element of a pair: placing a row takes as
#: many instructions as four pairs.
ROTARY_PER_THREAD = {2: 8, 4: 8}


def rotary_tile(narrowest: int) -> Tile:
    """Return the default setting of rotary_embedding, counted in pairs.

    Beside the loads of the pairs, float32 cos and sin take four more of 16 bytes for two-byte elements, and as many
    registers as the pairs in float32: with twice the elements, half as many programs would fit on a multiprocessor.
    """
    per_thread = ROTARY_PER_THREAD[narrowest]
    return Tile(per_thread * FLAT_THREADS, warps_for(per_thread * FLAT_THREADS, per_thread))


# ------------------------------------------------------------------------------------ columns (the gradient of a bias)


class Columns(NamedTuple):
    """The setting of a kernel that sums columns: ``tiles`` * ``parts`` programs of ``steps`` tiles of rows * cols."""

    rows: int
    cols: int
    steps: int
    tiles: int
    parts: int
    warps: int

    def are_even(self, n_rows: int, size: int) -> bool:
        """Return if (n_rows, size) is whole tiles."""
        return size % self.cols == 0 and n_rows % (self.steps * self.rows) == 0


#: Bytes of a row in a tile: the 16-byte loads of one warp. And the maximum rows of a tile: each row has its 64-bit
#: offset in registers.
ROW_BYTES = 512
MAX_ROWS = 128

#: Rows of x per row of sums. With at least 64, writing and reading the sums is 8 / (6 * 64) = 2 % of the bytes that
#: bias_gelu moves for two-byte elements, and 3 % for dropout. If this gives fewer programs than fill a chip, the
#: tensors are so small that the sums stay in the L2 cache, and 16 rows are enough.
PART_ROWS = 64
SMALL_PART_ROWS = 16

#: The target number of programs for each of ``Chip.fills``: eight for each that an H200 runs at a time, 8192 in all, so
#: that the last, partly filled round is a small share.
TARGET_ROUNDS = 16
MAX_PARTS = 1024


def share_columns(n_rows: int, size: int, narrowest: int, inputs: int = 2) -> Columns:
    """Return the setting for sums over the columns of ``inputs`` tensors (n_rows, size).

    ``narrowest`` is the element size in bytes of the narrowest dtype. The setting determines the order of the sum, and
    with it the bits of the result.
    """
    # the sums take as many registers as the elements of an input
    block, warps = tile(narrowest) if inputs == 1 else gated_tile(narrowest, True)
    cols = min(power_of_two(size), ROW_BYTES // narrowest)
    rows = min(block // cols, MAX_ROWS)
    tiles = ceil_div(size, cols)
    parts = min(ceil_div(n_rows, PART_ROWS), ceil_div(TARGET_ROUNDS * chip.fills, tiles), MAX_PARTS)
    if parts * tiles < chip.fills:
        parts = min(ceil_div(n_rows, SMALL_PART_ROWS), ceil_div(chip.fills, tiles))
    # a compile-time power of two: few variants to compile, and the interpreter can run the loop with any NumPy version
    steps = power_of_two(ceil_div(ceil_div(n_rows, parts), rows))
    return Columns(rows, cols, steps, tiles, ceil_div(n_rows, steps * rows), min(warps, rows * cols // 32 or 1))


#: Setting of ``add_sums``: elements per program, maximum rows of sums at a time, minimum columns.
SUM_TILE = 1024
SUM_ROWS = 256
SUM_COLS = 16


def share_sums(parts: int, size: int) -> Columns:
    """Return the setting for adding up sums (parts, size).

    Programs get few columns, so that there are many programs for a narrow bias too.
    """
    rows = min(power_of_two(parts), SUM_ROWS)
    cols = max(SUM_TILE // rows, SUM_COLS)
    steps = power_of_two(ceil_div(parts, rows))
    return Columns(rows, cols, steps, ceil_div(size, cols), 1, warps_for(rows * cols, 8))

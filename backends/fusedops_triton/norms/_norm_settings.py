"""The launch settings of the norms, of norms beside a gate, and of merged parts of attention: whole rows of a program.

``launch/settings.py`` has what all kernels share, and what settings follow from.
"""

from __future__ import annotations

from typing import NamedTuple

from fusedops_triton.launch import settings
from fusedops_triton.launch.chips import CHIPS
from fusedops_triton.launch.settings import (
    HALF_RESIDENT,
    LONG_TILE,
    ROW_PER_THREAD,
    SHORT_ROWS,
    SHORT_TILE,
    Plan,
    ceil_div,
    power_of_two,
    warps_for,
)

#: The widest row of a norm on chip, by the element size of its widest tensor: forward, and backward, which holds two
#: inputs and the sums of weight and bias over its rows. At twice the width, registers spill on sm_90
#: (test_triton_compile.py): 48 to 232 bytes per thread backward, 64 to 96 forward with a residual.
NORM_FORWARD_ON_CHIP = {2: 32768, 4: 16384}
NORM_BACKWARD_ON_CHIP = {2: 8192, 4: 8192}

#: Elements per thread of the forward: four 16-byte loads in flight, and from NORM_WIDE columns of two-byte elements on
#: eight, so that several programs fit on a multiprocessor and one computes while another waits. LayerNorm at 8192 and
#: 16384 columns on an H200, with 16, 32 and 64 of them: 91, 96, 96 and 59, 93, 96 % of the speed of a copy.
NORM_PER_THREAD = {2: 32, 4: 16}
NORM_WIDE = 8192
NORM_WIDE_PER_THREAD = {2: 64, 4: 16}

#: Elements per thread of the backward, one 16-byte load of each two-byte tensor. Inputs and sums take up to six
#: registers for each element: with twice as many, half of the threads would not be resident.
NORM_BACKWARD_PER_THREAD = {2: 8, 4: 8}

#: Rows of x per row of sums, at least: sums are written and read in float32. With 16 rows of two-byte elements that is
#: 8 / (6 * 16) = 8 % of the bytes that rms_norm moves; tensors with so few rows for each program stay in the L2 cache.
NORM_PART_ROWS = 16

#: Warps of the programs of a processor that a norm's backward is divided into: those that are resident at a time, of 64
#: registers. On an H200, half and twice as many programs took 7 to 24 % more at (32768, 4096).
NORM_WARPS = 32


class Backward(NamedTuple):
    """The setting of a norm's backward for rows of one length, where it does not follow from that of others.

    per_thread: elements of a thread. registers, ahead, held, again: see ``NormSums``. resident: warps of a processor,
    as NORM_WARPS.
    """

    per_thread: int
    registers: int | None
    ahead: int
    resident: int
    held: bool = True
    again: tuple[bool, bool] = (False, False)


#: The widest rows of two-byte elements on chip, on NVIDIA, by chip: of RMSNorm and of LayerNorm. A multiprocessor has
#: one program, a thread of it 32 to 128 sums in registers. When s, grad and the weight were held beside them, up to 176
#: bytes of a thread spilled; an H200 reached 81 and 45 % of the speed of a copy, and 38 with two reads of a LayerNorm's
#: row. So what a cache has is read again. Which of it leaves at most 16 bytes to spill depends on the compiler of each
#: chip: these do, with Triton 3.6 and 3.9. No GPU has run them.
NORM_WIDEST = 16384
NORM_WIDEST_BACKWARD = {
    "sm_80": (Backward(32, 128, 0, 16, False), Backward(32, 128, 0, 16, False, (True, True))),
    "sm_90": (Backward(32, 128, 1, 16, False, (True, False)), Backward(32, 128, 0, 16, False, (False, True))),
    "sm_100": (Backward(32, 128, 1, 16, False, (False, True)), Backward(64, None, 0, 8, False, (True, False))),
}
#: Of LayerNorm on sm_90 with fewer columns, whose masks take registers: 16 bytes spill, which were 96 and 120 (with
#: Triton 3.6 32, which were 8 and 16).
NORM_WIDEST_MASKED = Backward(32, 128, 0, 16, False, (True, True))
#: With a weight of float32: RMSNorm spills up to 24 bytes so, and LayerNorm 80 to 144, which were 136 to 200. On sm_80
#: ptxas gives a thread 32 registers, and 2300 bytes spill, where there are masks: 72 to 224 with the second one.
NORM_WIDEST_FLOAT32_WEIGHT = Backward(64, None, 0, 8, False, (True, False))
NORM_WIDEST_FLOAT32_WEIGHT_MASKED = Backward(32, 128, 0, 16, False)

#: Elements of a thread for the same rows without sums, or without accesses of 16 bytes: of RMSNorm and of LayerNorm.
NORM_WIDEST_PER_THREAD = {False: 32, True: 16}


#: Settings of a B200 for two-byte rows. Its memory is 1.5 times as fast for each multiprocessor as an H200's: more rows
#: must be in flight. Forward without a residual, by the row's length: elements and registers of a thread, so that 12
#: warps fit on a multiprocessor and not 8 (other lengths would spill). Backward, by the next power of two. Chosen by
#: the count of compiled instructions; no B200 has run them.
B200_FORWARD = {8192: (128, 168), 16384: (128, 168)}
B200_BACKWARD = {4096: Backward(16, 128, 2, 16), 8192: Backward(32, None, 1, 8)}
#: RMSNorm of 8192 columns: without the weight in registers two programs fit on a multiprocessor, and one computes while
#: the other waits. With a tile read ahead it spills 104 bytes.
B200_RMS_NORM_WIDE = Backward(32, 128, 0, 16, held=False)


def _is_b200(size: int, widest: int) -> bool:
    """Return True where a B200 may have another setting for rows of ``size`` elements: by accesses of 16 bytes."""
    return settings.chip == CHIPS["sm_100"] and widest == 2 and size % 8 == 0


def norm_plan(size: int, widest: int, inputs: int) -> Plan:
    """Return the default setting of a norm's forward for rows of ``size`` elements of ``inputs`` tensors.

    ``widest`` is the element size in bytes of the widest dtype.
    """
    width = power_of_two(size)
    if width > NORM_FORWARD_ON_CHIP[widest]:
        block = LONG_TILE[widest] // inputs
        return Plan(1, block, warps_for(block, ROW_PER_THREAD[widest] // (2 * inputs)), False)
    per_thread = NORM_WIDE_PER_THREAD[widest] if width >= NORM_WIDE else NORM_PER_THREAD[widest] // inputs
    registers = None
    if inputs == 1 and size in B200_FORWARD and _is_b200(size, widest):
        per_thread, registers = B200_FORWARD[size]
    rows = min(max(1, SHORT_TILE // inputs // width), SHORT_ROWS)
    return Plan(rows, width, warps_for(rows * width, per_thread), True, registers)


class NormSums(NamedTuple):
    """The setting of a norm's backward: each program computes ``steps`` tiles of ``rows`` rows.

    joined: LayerNorm's two sums over a row are those of one tensor of pairs. registers: of a thread, at most; None:
    any. ahead: tiles that are loaded while one is computed. held: the weight is in registers, not read for each row.
    again: s and grad of a row are read from a cache after its sums.
    """

    rows: int
    block: int
    warps: int
    on_chip: bool
    steps: int
    joined: bool = True
    registers: int | None = HALF_RESIDENT
    ahead: int = 0
    held: bool = True
    again: tuple[bool, bool] = (False, False)


def norm_sums(n_rows: int, size: int, widest: int, sums: bool, centered: bool, weight: int = 2) -> NormSums:
    """Return the setting of a norm's backward for (n_rows, size).

    ``sums``: rows are summed too. ``centered``: LayerNorm. ``weight``: the size of an element of the weight in bytes.

    The setting determines the order of the sums, and with it the bits of the result. Tiles of two-byte elements are
    read ahead; of float32, an H200 took 20 % more so for layer_norm at 4096.
    """
    width, per_thread, longest = power_of_two(size), NORM_BACKWARD_PER_THREAD[widest], NORM_BACKWARD_ON_CHIP[widest]
    registers: int | None = HALF_RESIDENT
    # on sm_100 ptxas moves out 6 to 18 registers of a thread for a tensor of pairs
    joined = width < NORM_WIDE // 2 or not centered or settings.chip != CHIPS["sm_100"]
    ahead, resident, held = int(widest == 2), NORM_WARPS, True
    again, setting = (False, False), None
    if sums and width in B200_BACKWARD and _is_b200(size, widest):
        setting = B200_BACKWARD[width] if centered or width != NORM_WIDE else B200_RMS_NORM_WIDE
    # rows of an odd length are read twice: on chip, the masks and offsets of single elements spill up to 1880 bytes
    if widest == 2 and settings.chip.nvidia and width == NORM_WIDEST and size % 2 == 0:
        longest, joined, ahead = width, False, 0
        per_thread, registers = NORM_WIDEST_PER_THREAD[centered], (HALF_RESIDENT if centered else None)
        if sums and size % 8 == 0:  # other rows have narrow accesses, whose masks take the registers
            setting = _widest_backward(size < width, centered, weight)
    if setting is not None:
        per_thread, registers, ahead, resident, held, again = setting
    if width > longest:
        block = LONG_TILE[widest] // 2
        return NormSums(1, block, warps_for(block, ROW_PER_THREAD[widest] // 4), False, 1)
    rows = min(max(1, settings.chip.lanes * per_thread // width), SHORT_ROWS)
    warps = warps_for(rows * width, per_thread)
    if not sums:
        return NormSums(rows, width, warps, True, 1, joined, registers, held=width != NORM_WIDEST)
    parts = min(ceil_div(n_rows, NORM_PART_ROWS), settings.chip.processors * resident // warps)
    steps = ceil_div(ceil_div(n_rows, parts), rows)
    return NormSums(rows, width, warps, True, steps, joined, registers, ahead, held, again)


def _widest_backward(masked: bool, centered: bool, weight: int) -> Backward:
    """Return the setting of this chip for the widest rows. masked: they have fewer columns than the block."""
    chip = next(name for name in NORM_WIDEST_BACKWARD if settings.chip == CHIPS[name])
    if weight == 4:
        return NORM_WIDEST_FLOAT32_WEIGHT_MASKED if masked and chip == "sm_80" else NORM_WIDEST_FLOAT32_WEIGHT
    return NORM_WIDEST_MASKED if masked and centered and chip == "sm_90" else NORM_WIDEST_BACKWARD[chip][centered]


def gated_norm_plan(size: int, widest: int) -> Plan:
    """Return the default setting of the forward of a norm beside a gate, for groups of ``size`` elements, and of both
    directions of two parts of one attention.

    ``widest`` is the element size in bytes of the widest dtype.
    """
    width = power_of_two(size)
    rows = min(max(1, SHORT_TILE // 2 // width), SHORT_ROWS)
    return Plan(rows, width, warps_for(rows * width, NORM_PER_THREAD[widest] // 2), True)


def gated_norm_sums(n_rows: int, size: int, groups: int, widest: int, sums: bool, gate_first: bool = False) -> NormSums:
    """Return the setting of its backward for (n_rows, groups, size). sums: rows are summed too.

    Half the elements per thread of a norm's backward: three inputs and the derivative of the gate take the registers.
    At 4096 columns of two bytes as many, within 64 registers: a program of 1024 threads would be alone on a
    multiprocessor. On an H200, in percent of the speed of a copy: 85 in place of 65. With the gate first, these and
    longer groups read x again after the sum over a row: else 16 to 96 bytes of a thread spill.
    """
    width = power_of_two(size)
    alone = width == 4096 and widest == 2
    again = gate_first and (alone or width > 4096), False
    per_thread = NORM_BACKWARD_PER_THREAD[widest] // (1 if alone else 2)
    registers = HALF_RESIDENT if alone else None
    rows = min(max(1, settings.chip.lanes * per_thread // width), SHORT_ROWS)
    warps = warps_for(rows * width, per_thread)
    if not sums:
        return NormSums(rows, width, warps, True, 1, registers=registers, again=again)
    parts = min(ceil_div(n_rows, NORM_PART_ROWS), ceil_div(settings.chip.processors * NORM_WARPS, warps * groups))
    steps = ceil_div(ceil_div(n_rows, parts), rows)
    return NormSums(rows, width, warps, True, steps, registers=registers, again=again)

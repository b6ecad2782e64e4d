"""A model of the speed of a kernel that memory limits: the programs of a multiprocessor wait, then issue, in turns.

A program waits for memory and for its reductions, then issues its instructions, and starts again. The programs that are
resident at a time form a closed queue: all may wait at once, and one issues at a time. Its throughput by mean value
analysis (Reiser and Lavenberg, 1980), in bytes, is compared with the multiprocessor's part of a copy's speed.

START and the exponent of ``share`` were fitted by others to five points of Liger's softmax on an H100, as QuACK's plot
has them: 41, 69, 89, 96 and 94 % of a copy at 256, 512, 1024, 4096 and 32768 columns, by the model 40, 70, 92, 96 and
89. ``docs/triton-model.md`` has its errors on an H200. It is a model, not a measurement.
"""

from __future__ import annotations

from typing import NamedTuple

START = 700.0  # ns until the first instruction of a program that begins
REDUCTION, ALONE = 190.0, 80.0  # ns of a reduction over the warps of a program, and over one warp
BURST = 64.0  # bytes that a multiprocessor receives in a clock
MOST = 97.0  # percent: of a copy, which has its own instructions to issue


class Chip(NamedTuple):
    """What the model needs of a chip."""

    copy: float  # bytes a nanosecond of ``y.copy_(x)``
    processors: int
    clock: float  # GHz
    latency: float  # ns of a read from memory


#: The speed of a copy was measured on the H200 and is assumed for the others.
CHIPS = {
    "H100": Chip(3000.0, 132, 1.98, 600.0),
    "H200": Chip(4310.0, 132, 1.98, 600.0),
    "B200": Chip(7200.0, 148, 1.92, 700.0),
}


class Program(NamedTuple):
    """One program of a kernel."""

    instructions: float  # that a warp issues
    warps: int
    resident: int  # programs of a multiprocessor
    nbytes: float  # that it must load and store
    steps: int  # trips of its loop, at each of which it waits for what it loads; 1 without a loop
    reductions: float  # that it waits for
    ahead: int  # a trip loads what the trip so many later needs; 0: what it needs itself


def share(program: Program, chip: Chip) -> float:
    """Return the speed in percent of a copy's."""
    trips = program.steps
    service = program.instructions * program.warps / 4 / chip.clock / trips
    waits = program.reductions * (REDUCTION if program.warps > 1 else ALONE) / trips
    moving = program.nbytes / trips / BURST / chip.clock
    latency = max(chip.latency - program.ahead * (service + waits), 0.0)
    cycle = _cycle(service, START / trips + latency + waits + moving, program.resident)
    raw = program.resident * program.nbytes / trips / cycle / (chip.copy / chip.processors)
    return min(MOST, 100.0 * (1.0 + raw**-3.0) ** (-1.0 / 3.0))


def _cycle(service: float, waiting: float, programs: int) -> float:
    """Return the mean time from one start of a trip to the next of one of ``programs`` programs."""
    queued, cycle = 0.0, service + waiting
    for count in range(1, programs + 1):
        residence = service * (1.0 + queued)
        cycle = residence + waiting
        queued = count * residence / cycle
    return cycle

"""A model of the speed of a kernel that memory or products limit: programs wait, then issue, in turns.

A program waits for memory and for its reductions, then issues its instructions, and starts again. If it has products,
the tensor cores are a second queue. The programs that are
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
    products: float = 0.0  # clocks of the tensor cores
    loaded: float = 0.0  # bytes that it loads, from the L2 cache where others have loaded them


def share(program: Program, chip: Chip) -> float:
    """Return the speed in percent of that of a copy, or of the tensor cores where their products take longer."""
    if program.products:
        return min(MOST, 100.0 * max(_least(program, chip)) / nanoseconds(program, chip))
    trips = program.steps
    service = program.instructions * program.warps / 4 / chip.clock / trips
    waits = program.reductions * (REDUCTION if program.warps > 1 else ALONE) / trips
    moving = program.nbytes / trips / BURST / chip.clock
    latency = max(chip.latency - program.ahead * (service + waits), 0.0)
    cycle = _cycle((service,), START / trips + latency + waits + moving, program.resident)
    raw = program.resident * program.nbytes / trips / cycle / (chip.copy / chip.processors)
    return min(MOST, 100.0 * (1.0 + raw**-3.0) ** (-1.0 / 3.0))


def nanoseconds(program: Program, chip: Chip) -> float:
    """Return the time of one of many programs on a multiprocessor, which has several of them at a time.

    A program with products waits in two queues: to issue, and for the tensor cores. What it loads arrives while
    it computes, if it reads ahead.
    """
    if not program.products:
        return _least(program, chip)[0] / share(program, chip) * 100.0
    trips = program.steps
    service = program.instructions * program.warps / 4 / chip.clock / trips
    tensor = program.products / chip.clock / trips
    waits = program.reductions * (REDUCTION if program.warps > 1 else ALONE) / trips
    moving = max(program.loaded, program.nbytes) / trips / BURST / chip.clock
    arriving = max(chip.latency + moving - program.ahead * (service + tensor + waits), 0.0)
    cycle = _cycle((service, tensor), START / trips + arriving + waits, program.resident)
    in_turns = trips * max(cycle / program.resident, moving)
    return (_least(program, chip)[0] ** 3 + in_turns**3) ** (1 / 3)


def of_products(program: Program, chip: Chip) -> float:
    """Return the least time of the products, divided by that of the bytes."""
    of_bytes, products = _least(program, chip)
    return products / of_bytes


def _least(program: Program, chip: Chip) -> tuple[float, float]:
    """Return the least times of a program: of its bytes at a copy's speed, and of its products, in nanoseconds."""
    return program.nbytes * chip.processors / chip.copy, program.products / chip.clock


def _cycle(services: tuple[float, ...], waiting: float, programs: int) -> float:
    """Return the mean time from one start of a trip to the next of one of ``programs`` programs.

    Args:
        services: the time that a trip takes in each queue.
        waiting: the time that it takes in none.
        programs: that take turns.
    """
    queued, cycle = [0.0] * len(services), sum(services) + waiting
    for count in range(1, programs + 1):
        residence = [service * (1.0 + waiting_ones) for service, waiting_ones in zip(services, queued, strict=True)]
        cycle = sum(residence) + waiting
        queued = [count * each / cycle for each in residence]
    return cycle

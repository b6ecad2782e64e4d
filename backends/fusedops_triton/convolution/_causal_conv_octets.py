"""The causal convolution in Triton where positions are next to each other: a thread has eight of them, by one access.

The positions before the eight come from the cache, by one more access of the same width, and a tap is another register.
Forward alone, for 2 to 4 taps of 16 bits, without packed sequences and states, where rows are whole eights:
``_causal_conv.py`` has the others.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import read, widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton._launch import Launch, cached_by_layout
from fusedops_triton._settings import FLAT_THREADS, ceil_div, power_of_two, warps_for
from fusedops_triton.convolution._causal_conv_walk import output_of, takes_walk, taps_of

#: Positions of a thread: the weights and the place of a row take as many instructions as six of them.
PER_THREAD = 16
#: The most positions of a program, and the fewest of a row: those of a warp with one access.
LONGEST, SHORTEST = FLAT_THREADS * PER_THREAD, 256


def takes_octets(x: Tensor, width: int, steps: tuple[int, ...]) -> bool:
    """Return True where eight positions are one access, of rows that are long enough."""
    aligned = x.dtype.itemsize == 2 and all(size % 8 == 0 for size in (x.shape[2], *steps))
    return aligned and takes_walk(width) and x.shape[2] >= SHORTEST


@cached_by_layout
def octets_launch(shape: tuple[int, int, int], width: int, steps: tuple[int, ...], silu: bool) -> Launch:
    """Return the launch for (B, C, S). steps: of x and y, from one batch and one row to the next."""
    batch, channels, positions = shape
    block = min(power_of_two(positions), LONGEST)
    tiles = ceil_div(positions, block)
    of_steps = min((unit(step) for step in steps if step), default=8)  # 0: of an expanded dim
    constants = {"WIDTH": width, "SILU": silu, "OCTETS": block // 8, "UNIT": of_steps, "EVEN": positions % block == 0}
    sizes = (*(step // of_steps for step in steps), channels, positions // 8, tiles)
    return Launch(octets_forward, (batch * channels * tiles,), sizes, constants, warps_for(block, PER_THREAD))


@profiled(do_not_specialize=["x_batch", "x_step", "y_batch", "y_step", "channels", "octets", "tiles"])
def octets_forward(
    y_ptr, x_ptr, weight_ptr, bias_ptr, x_batch, x_step, y_batch, y_step, channels, octets, tiles,
    WIDTH: tl.constexpr, SILU: tl.constexpr, OCTETS: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute OCTETS times eight positions of a channel. Grid (B * channels * tiles,).

    octets: of a row. EVEN: no program has fewer. The rest is as in ``_conv_forward``.
    """
    row = tl.program_id(0) // tiles
    batch, c = (row // channels).to(tl.int64), (row % channels).to(tl.int64)
    octet = (tl.program_id(0) % tiles).to(tl.int64) * OCTETS + tl.arange(0, OCTETS)
    at = octet[:, None] * 8 + tl.arange(0, 8)[None, :]
    there = (tl.full([OCTETS], 1, tl.int1) if EVEN else octet < octets)[:, None]
    x_ptr += (batch * x_batch + c * x_step) * UNIT
    x0, x1, x2, x3, x4, x5, x6, x7 = _apart(read(x_ptr + at, there), OCTETS)
    _, _, _, _, _, b5, b6, b7 = _apart(read(x_ptr + (at - 8), there & (octet > 0)[:, None]), OCTETS)
    weight_ptr += c * WIDTH + (WIDTH - 1)
    bias = 0.0
    if bias_ptr is not None:
        bias = widened(tl.load(bias_ptr + c))
    t0, t1 = widened(tl.load(weight_ptr)), widened(tl.load(weight_ptr - 1))
    t2 = widened(tl.load(weight_ptr - 2)) if WIDTH > 2 else t0
    t3 = widened(tl.load(weight_ptr - 3)) if WIDTH > 3 else t0
    y0 = output_of(taps_of(bias, t0, t1, t2, t3, x0, b7, b6, b5, WIDTH), SILU)
    y1 = output_of(taps_of(bias, t0, t1, t2, t3, x1, x0, b7, b6, WIDTH), SILU)
    y2 = output_of(taps_of(bias, t0, t1, t2, t3, x2, x1, x0, b7, WIDTH), SILU)
    y3 = output_of(taps_of(bias, t0, t1, t2, t3, x3, x2, x1, x0, WIDTH), SILU)
    y4 = output_of(taps_of(bias, t0, t1, t2, t3, x4, x3, x2, x1, WIDTH), SILU)
    y5 = output_of(taps_of(bias, t0, t1, t2, t3, x5, x4, x3, x2, WIDTH), SILU)
    y6 = output_of(taps_of(bias, t0, t1, t2, t3, x6, x5, x4, x3, WIDTH), SILU)
    y7 = output_of(taps_of(bias, t0, t1, t2, t3, x7, x6, x5, x4, WIDTH), SILU)
    even, odd = tl.join(tl.join(y0, y4), tl.join(y2, y6)), tl.join(tl.join(y1, y5), tl.join(y3, y7))
    y = tl.reshape(tl.join(even, odd), (OCTETS, 8))
    tl.store(y_ptr + (batch * y_batch + c * y_step) * UNIT + at, rounded(y, y_ptr), there)


@triton.jit
def _apart(x, OCTETS: tl.constexpr):
    """Return the columns of (OCTETS, 8), each (OCTETS,)."""
    even, odd = tl.split(tl.reshape(x, (OCTETS, 2, 2, 2)))
    from_0, from_2 = tl.split(even)
    from_1, from_3 = tl.split(odd)
    x0, x4 = tl.split(from_0)
    x1, x5 = tl.split(from_1)
    x2, x6 = tl.split(from_2)
    x3, x7 = tl.split(from_3)
    return x0, x1, x2, x3, x4, x5, x6, x7

"""The causal convolution in Triton where positions are next to each other: a thread has eight of them, by one access.

The positions before the eight come from the cache, by one more access of the same width, and a tap is another register.
Backward a thread has two eights, and the positions after them too: it computes the gradients of W - 1 more sums than it
adds up. For 2 to 4 taps of 16 bits, without packed sequences and states, where rows are whole eights, or pairs of them:
``_causal_conv.py`` and ``_causal_conv_backward.py`` have the others.
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
from fusedops_triton.convolution._causal_conv_walk import (
    of_known,
    output_of,
    plus,
    slopes,
    takes_walk,
    taps_of,
    with_products,
)
from fusedops_triton.launch import settings
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import FLAT_THREADS, ceil_div, power_of_two, warps_for

#: Positions of a thread: the weights and the place of a row take as many instructions as six of them.
PER_THREAD = 16
#: The most positions of a program, and the fewest of a row: those of a warp with one access.
LONGEST, SHORTEST = FLAT_THREADS * PER_THREAD, 256
#: Backward, how often a program goes on, at most: one warp, which adds up its sums without a barrier.
STEPS = 16


def takes_octets(x: Tensor, width: int, steps: tuple[int, ...], of_thread: int = 8) -> bool:
    """Return True where eight positions are one access, of rows that are long enough, and whole threads."""
    aligned = x.dtype.itemsize == 2 and x.shape[2] % of_thread == 0 and all(step % 8 == 0 for step in steps)
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


@cached_by_layout
def octets_backward_launch(
    shape: tuple[int, int, int], width: int, steps: tuple[int, ...], silu: bool
) -> tuple[Launch, int]:
    """Return the launch for (B, C, S), and its rows of sums. steps: of x, grad and dx."""
    batch, channels, positions = shape
    pairs = settings.chip.lanes
    turns = ceil_div(positions, 16 * pairs)
    repeats = min(turns, STEPS)
    while repeats > 1 and batch * channels * ceil_div(turns, repeats) < settings.chip.fills:
        repeats //= 2
    tiles = ceil_div(turns, repeats)
    of_steps = min((unit(step) for step in steps if step), default=8)
    even = positions % (16 * pairs * repeats) == 0
    constants = {"WIDTH": width, "SILU": silu, "PAIRS": pairs, "UNIT": of_steps, "EVEN": even}
    sizes = (*(step // of_steps for step in steps), channels, positions // 8, tiles, repeats)
    return Launch(octets_backward, (batch * channels * tiles,), sizes, constants, 1), batch * tiles


# ------------------------------------------------------------------------------------------------------------ kernels


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
    bias, t0, t1, t2, t3 = _weights(weight_ptr, bias_ptr, c, WIDTH)
    y0 = output_of(taps_of(bias, t0, t1, t2, t3, x0, b7, b6, b5, WIDTH), SILU)
    y1 = output_of(taps_of(bias, t0, t1, t2, t3, x1, x0, b7, b6, WIDTH), SILU)
    y2 = output_of(taps_of(bias, t0, t1, t2, t3, x2, x1, x0, b7, WIDTH), SILU)
    y3 = output_of(taps_of(bias, t0, t1, t2, t3, x3, x2, x1, x0, WIDTH), SILU)
    y4 = output_of(taps_of(bias, t0, t1, t2, t3, x4, x3, x2, x1, WIDTH), SILU)
    y5 = output_of(taps_of(bias, t0, t1, t2, t3, x5, x4, x3, x2, WIDTH), SILU)
    y6 = output_of(taps_of(bias, t0, t1, t2, t3, x6, x5, x4, x3, WIDTH), SILU)
    y7 = output_of(taps_of(bias, t0, t1, t2, t3, x7, x6, x5, x4, WIDTH), SILU)
    y = _together(y0, y1, y2, y3, y4, y5, y6, y7, OCTETS)
    tl.store(y_ptr + (batch * y_batch + c * y_step) * UNIT + at, rounded(y, y_ptr), there)


@profiled(
    do_not_specialize=[
        "x_batch", "x_step", "g_batch", "g_step", "dx_batch", "dx_step", "channels", "octets", "tiles", "steps",
    ]
)  # fmt: skip
def octets_backward(
    dx_ptr, sums_ptr, grad_ptr, x_ptr, weight_ptr, bias_ptr,
    x_batch, x_step, g_batch, g_step, dx_batch, dx_step, channels, octets, tiles, steps,
    WIDTH: tl.constexpr, SILU: tl.constexpr, PAIRS: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of ``steps`` times PAIRS times sixteen positions of a channel. Grid as in forward.

    dx_ptr, sums_ptr: as in ``_conv_backward``. octets: of a row, an even number. EVEN: no program has fewer.
    """
    row = tl.program_id(0) // tiles
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    batch, c = (row // channels).to(tl.int64), (row % channels).to(tl.int64)
    x_ptr += (batch * x_batch + c * x_step) * UNIT
    grad_ptr += (batch * g_batch + c * g_step) * UNIT
    bias, t0, t1, t2, t3 = _weights(weight_ptr, bias_ptr, c, WIDTH)
    of_bias, of_t0 = tl.zeros([PAIRS], tl.float32), tl.zeros([PAIRS], tl.float32)
    of_t1, of_t2, of_t3 = tl.zeros_like(of_t0), tl.zeros_like(of_t0), tl.zeros_like(of_t0)
    if dx_ptr is not None:
        dx_ptr += (batch * dx_batch + c * dx_step) * UNIT
    for step in range(steps):
        octet = ((tile * steps + step) * PAIRS + tl.arange(0, PAIRS)) * 2
        at = octet[:, None] * 8 + tl.arange(0, 8)[None, :]
        own = tl.full([PAIRS], 1, tl.int1) if EVEN else octet < octets
        there, after = own[:, None], octet + 2 < octets
        _, _, _, _, _, b5, b6, b7 = _apart(read(x_ptr + (at - 8), there & (octet > 0)[:, None]), PAIRS)
        x0, x1, x2, x3, x4, x5, x6, x7 = _apart(read(x_ptr + at, there), PAIRS)
        y0, y1, y2, y3, y4, y5, y6, y7 = _apart(read(x_ptr + (at + 8), there), PAIRS)
        n0, n1, n2, n3, _, _, _, _ = _apart(read(x_ptr + (at + 16), after[:, None]), PAIRS)
        g0, g1, g2, g3, g4, g5, g6, g7 = _apart(read(grad_ptr + at, there), PAIRS)
        h0, h1, h2, h3, h4, h5, h6, h7 = _apart(read(grad_ptr + (at + 8), there), PAIRS)
        e0, e1, e2, e3, _, _, _, _ = _apart(read(grad_ptr + (at + 16), after[:, None]), PAIRS)
        g0, g1, g2, g3 = slopes(g0, g1, g2, g3, bias, t0, t1, t2, t3, x0, x1, x2, x3, b7, b6, b5, WIDTH, SILU)
        g4, g5, g6, g7 = slopes(g4, g5, g6, g7, bias, t0, t1, t2, t3, x4, x5, x6, x7, x3, x2, x1, WIDTH, SILU)
        h0, h1, h2, h3 = slopes(h0, h1, h2, h3, bias, t0, t1, t2, t3, y0, y1, y2, y3, x7, x6, x5, WIDTH, SILU)
        h4, h5, h6, h7 = slopes(h4, h5, h6, h7, bias, t0, t1, t2, t3, y4, y5, y6, y7, y3, y2, y1, WIDTH, SILU)
        e0, e1, e2, _ = slopes(e0, e1, e2, e3, bias, t0, t1, t2, t3, n0, n1, n2, n3, y7, y6, y5, WIDTH, SILU)
        if sums_ptr is not None:
            g0, g1, g2, g3 = _four_known(g0, g1, g2, g3, own, EVEN)
            g4, g5, g6, g7 = _four_known(g4, g5, g6, g7, own, EVEN)
            h0, h1, h2, h3 = _four_known(h0, h1, h2, h3, own, EVEN)
            h4, h5, h6, h7 = _four_known(h4, h5, h6, h7, own, EVEN)
            of_bias += ((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7))
            of_bias += ((h0 + h1) + (h2 + h3)) + ((h4 + h5) + (h6 + h7))
            of_t0, of_t1, of_t2, of_t3 = with_products(
                of_t0, of_t1, of_t2, of_t3, g0, g1, g2, g3, x0, x1, x2, x3, b7, b6, b5, own, own, own, True, WIDTH
            )  # fmt: skip
            of_t0, of_t1, of_t2, of_t3 = with_products(
                of_t0, of_t1, of_t2, of_t3, g4, g5, g6, g7, x4, x5, x6, x7, x3, x2, x1, own, own, own, True, WIDTH
            )  # fmt: skip
            of_t0, of_t1, of_t2, of_t3 = with_products(
                of_t0, of_t1, of_t2, of_t3, h0, h1, h2, h3, y0, y1, y2, y3, x7, x6, x5, own, own, own, True, WIDTH
            )  # fmt: skip
            of_t0, of_t1, of_t2, of_t3 = with_products(
                of_t0, of_t1, of_t2, of_t3, h4, h5, h6, h7, y4, y5, y6, y7, y3, y2, y1, own, own, own, True, WIDTH
            )  # fmt: skip
        if dx_ptr is not None:
            d0, d1, d2, d3 = _of_inputs(t0, t1, t2, t3, g0, g1, g2, g3, g4, g5, g6, own, True, WIDTH)
            d4, d5, d6, d7 = _of_inputs(t0, t1, t2, t3, g4, g5, g6, g7, h0, h1, h2, own, True, WIDTH)
            dx = _together(d0, d1, d2, d3, d4, d5, d6, d7, PAIRS)
            tl.store(dx_ptr + at, rounded(dx, dx_ptr), there)
            d0, d1, d2, d3 = _of_inputs(t0, t1, t2, t3, h0, h1, h2, h3, h4, h5, h6, own, True, WIDTH)
            d4, d5, d6, d7 = _of_inputs(t0, t1, t2, t3, h4, h5, h6, h7, e0, e1, e2, after, False, WIDTH)
            dx = _together(d0, d1, d2, d3, d4, d5, d6, d7, PAIRS)
            tl.store(dx_ptr + (at + 8), rounded(dx, dx_ptr), there)
    if sums_ptr is not None:
        sums_ptr += ((batch * tiles + tile) * channels + c) * (WIDTH + 1)
        tl.store(sums_ptr + (WIDTH - 1), tl.sum(of_t0))
        tl.store(sums_ptr + (WIDTH - 2), tl.sum(of_t1))
        if WIDTH > 2:
            tl.store(sums_ptr + (WIDTH - 3), tl.sum(of_t2))
        if WIDTH > 3:
            tl.store(sums_ptr + (WIDTH - 4), tl.sum(of_t3))
        tl.store(sums_ptr + WIDTH, tl.sum(of_bias))


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def _weights(weight_ptr, bias_ptr, c, WIDTH: tl.constexpr):
    """Return the bias of a channel, and the weights of the input of a position, of the one before it, and so on."""
    bias = 0.0
    if bias_ptr is not None:
        bias = widened(tl.load(bias_ptr + c))
    weight_ptr += c * WIDTH + (WIDTH - 1)
    t0, t1 = widened(tl.load(weight_ptr)), widened(tl.load(weight_ptr - 1))
    t2 = widened(tl.load(weight_ptr - 2)) if WIDTH > 2 else t0
    t3 = widened(tl.load(weight_ptr - 3)) if WIDTH > 3 else t0
    return bias, t0, t1, t2, t3


@triton.jit
def _four_known(g0, g1, g2, g3, known, SURE: tl.constexpr):
    return of_known(g0, known, SURE), of_known(g1, known, SURE), of_known(g2, known, SURE), of_known(g3, known, SURE)


@triton.jit
def _of_inputs(
    t0, t1, t2, t3, g0, g1, g2, g3, h0, h1, h2, known, SURE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Return the gradients of four inputs, from those of the sums from there on; ``known``: those of h0, h1, h2."""
    a, b, c, d = g0 * t0 + g1 * t1, g1 * t0 + g2 * t1, g2 * t0 + g3 * t1, plus(g3 * t0, h0, t1, known, SURE)
    if WIDTH > 2:
        a, b = a + g2 * t2, b + g3 * t2
        c, d = plus(c, h0, t2, known, SURE), plus(d, h1, t2, known, SURE)
    if WIDTH > 3:
        a, b = a + g3 * t3, plus(b, h0, t3, known, SURE)
        c, d = plus(c, h1, t3, known, SURE), plus(d, h2, t3, known, SURE)
    return a, b, c, d


@triton.jit
def _together(x0, x1, x2, x3, x4, x5, x6, x7, OCTETS: tl.constexpr):
    """Return (OCTETS, 8) of its columns."""
    even, odd = tl.join(tl.join(x0, x4), tl.join(x2, x6)), tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return tl.reshape(tl.join(even, odd), (OCTETS, 8))


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

"""The causal convolution in Triton where channels are next to each other: each number is read once, and kept.

A program has some channels and walks over a run of positions. The inputs of the taps are in registers, as are the sums
of the gradients of weight and bias; the gradient of an input is written W - 1 positions after its own. Four positions
are read before the first of their results is written: no read is moved over a write. Past the end of a run, backward
computes the next W - 1 positions too. For 2 to 4 taps, without packed sequences and states: ``_causal_conv.py`` and
``_causal_conv_backward.py`` have the others.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import read, reciprocal
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.gated._gated import logistic, times
from fusedops_triton.launch import settings
from fusedops_triton.launch.chips import CHIPS
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import FLAT_THREADS, ceil_div, power_of_two, warps_for

#: Channels of a thread, and of a program.
PER_THREAD = 4
CHANNELS = FLAT_THREADS * PER_THREAD
#: The most registers of a thread backward: four programs on a processor. It takes 167 without a limit; on sm_100, where
#: 32 bytes of float32 would spill, 159.
REGISTERS = 128
#: The longest and the shortest run of a program: backward has a halo of W - 1 positions on each side.
RUN, SHORTEST_RUN = 256, 32


class Walk(NamedTuple):
    """The setting of a kernel that walks over positions."""

    channels: int
    positions: int
    tiles: tuple[int, int]  # of channels, and runs of positions
    warps: int


def walk_setting(batch: int, channels: int, positions: int) -> Walk:
    """Return the setting for (B, C, S): runs are shorter where there are few programs."""
    block = min(power_of_two(channels), CHANNELS)
    tiles, run = ceil_div(channels, block), RUN
    while run > SHORTEST_RUN and batch * tiles * ceil_div(positions, run) < settings.chip.fills:
        run //= 2
    return Walk(block, run, (tiles, ceil_div(positions, run)), warps_for(block, PER_THREAD))


def takes_walk(width: int) -> bool:
    """Return True for the numbers of taps that the kernels have registers for."""
    return 2 <= width <= 4


def common_unit(steps: tuple[int, ...]) -> int:
    """Return the largest power of two that divides all steps, up to that of wide accesses."""
    return min((unit(step) for step in steps if step), default=1)  # 0: of an expanded dim, or no result


@cached_by_layout
def walk_launch(
    kernel: Any, shape: tuple[int, int, int], width: int, steps: tuple[int, ...], silu: bool
) -> tuple[Launch, int]:
    """Return the launch for (B, C, S), and its rows of sums. steps: of each tensor, of batches and of positions."""
    batch, channels, positions = shape
    setting = walk_setting(batch, channels, positions)
    of_steps = common_unit(steps)
    constants = {
        "WIDTH": width, "SILU": silu, "CHANNELS": setting.channels, "RUN": setting.positions, "UNIT": of_steps,
        "EVEN": channels % setting.channels == 0, "WHOLE": positions % 4 == 0,
    }  # fmt: skip
    sizes = (*(step // of_steps for step in steps), channels, positions, *setting.tiles)
    parts = batch * setting.tiles[1]
    registers = REGISTERS if kernel is walk_backward and settings.chip != CHIPS["sm_100"] else None
    return Launch(kernel, (parts * setting.tiles[0],), sizes, constants, setting.warps, registers), parts


# ------------------------------------------------------------------------------------------------------------ kernels


@profiled(do_not_specialize=["x_batch", "x_step", "y_batch", "y_step", "channels", "positions", "tiles_c", "tiles_s"])
def walk_forward(
    y_ptr, x_ptr, weight_ptr, bias_ptr, x_batch, x_step, y_batch, y_step, channels, positions, tiles_c, tiles_s,
    WIDTH: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr, RUN: tl.constexpr, UNIT: tl.constexpr,
    EVEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute a run of positions of CHANNELS channels. Grid (B * tiles_c * tiles_s,).

    EVEN: no program has fewer channels. WHOLE: the positions are a multiple of 4. The rest is as in ``_conv_forward``.
    """
    c, there, first, batch = _place(channels, tiles_c, tiles_s, CHANNELS, RUN, EVEN)
    x_ptr += batch * x_batch * UNIT + c
    y_ptr += batch * y_batch * UNIT + c
    x_step, y_step = x_step.to(tl.int64) * UNIT, y_step.to(tl.int64) * UNIT
    bias, t0, t1, t2, t3 = _weights(weight_ptr, bias_ptr, c, there, WIDTH, CHANNELS)
    x1 = read(x_ptr + (first - 1) * x_step, _among(there, first - 1, 0, positions))
    x2 = read(x_ptr + (first - 2) * x_step, _among(there, first - 2, 0, positions)) if WIDTH > 2 else x1
    x3 = read(x_ptr + (first - 3) * x_step, _among(there, first - 3, 0, positions)) if WIDTH > 3 else x1
    for p in range(first, tl.minimum(first + RUN, positions), 4):
        x = x_ptr + p * x_step
        n0 = read(x, there)
        n1 = read(x + x_step, _known(there, p + 1, positions, WHOLE))
        n2 = read(x + 2 * x_step, _known(there, p + 2, positions, WHOLE))
        n3 = read(x + 3 * x_step, _known(there, p + 3, positions, WHOLE))
        y = y_ptr + p * y_step
        y0 = output_of(taps_of(bias, t0, t1, t2, t3, n0, x1, x2, x3, WIDTH), SILU)
        y1 = output_of(taps_of(bias, t0, t1, t2, t3, n1, n0, x1, x2, WIDTH), SILU)
        y2 = output_of(taps_of(bias, t0, t1, t2, t3, n2, n1, n0, x1, WIDTH), SILU)
        y3 = output_of(taps_of(bias, t0, t1, t2, t3, n3, n2, n1, n0, WIDTH), SILU)
        tl.store(y, rounded(y0, y_ptr), there)
        tl.store(y + y_step, rounded(y1, y_ptr), _known(there, p + 1, positions, WHOLE))
        tl.store(y + 2 * y_step, rounded(y2, y_ptr), _known(there, p + 2, positions, WHOLE))
        tl.store(y + 3 * y_step, rounded(y3, y_ptr), _known(there, p + 3, positions, WHOLE))
        x1, x2, x3 = n3, n2, n1


@profiled(
    do_not_specialize=[
        "x_batch", "x_step", "g_batch", "g_step", "dx_batch", "dx_step", "channels", "positions", "tiles_c", "tiles_s",
    ]
)  # fmt: skip
def walk_backward(
    dx_ptr, sums_ptr, grad_ptr, x_ptr, weight_ptr, bias_ptr,
    x_batch, x_step, g_batch, g_step, dx_batch, dx_step, channels, positions, tiles_c, tiles_s,
    WIDTH: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr, RUN: tl.constexpr, UNIT: tl.constexpr,
    EVEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a run of positions of CHANNELS channels. Grid (B * tiles_c * tiles_s,).

    dx_ptr, sums_ptr: as in ``_conv_backward``; of these sums a run has a part.
    """
    c, there, first, batch = _place(channels, tiles_c, tiles_s, CHANNELS, RUN, EVEN)
    x_ptr += batch * x_batch * UNIT + c
    grad_ptr += batch * g_batch * UNIT + c
    x_step, g_step, dx_step = x_step.to(tl.int64) * UNIT, g_step.to(tl.int64) * UNIT, dx_step.to(tl.int64) * UNIT
    bias, t0, t1, t2, t3 = _weights(weight_ptr, bias_ptr, c, there, WIDTH, CHANNELS)
    x1 = read(x_ptr + (first - 1) * x_step, _among(there, first - 1, 0, positions))
    x2 = read(x_ptr + (first - 2) * x_step, _among(there, first - 2, 0, positions)) if WIDTH > 2 else x1
    x3 = read(x_ptr + (first - 3) * x_step, _among(there, first - 3, 0, positions)) if WIDTH > 3 else x1
    # of a position, and of those before it: h, the gradient of the sum of the taps
    h1, h2, h3 = tl.zeros_like(bias), tl.zeros_like(bias), tl.zeros_like(bias)
    of_bias, of_t0, of_t1 = tl.zeros_like(bias), tl.zeros_like(bias), tl.zeros_like(bias)
    of_t2, of_t3 = tl.zeros_like(bias), tl.zeros_like(bias)
    if dx_ptr is not None:
        dx_ptr += batch * dx_batch * UNIT + c - (WIDTH - 1) * dx_step
    last = tl.minimum(first + RUN, positions)
    for q in range(first, last, 4):
        x, grad = x_ptr + q * x_step, grad_ptr + q * g_step
        k1, k2 = _known(there, q + 1, positions, WHOLE), _known(there, q + 2, positions, WHOLE)
        k3 = _known(there, q + 3, positions, WHOLE)
        n0, n1, n2, n3 = read(x, there), read(x + x_step, k1), read(x + 2 * x_step, k2), read(x + 3 * x_step, k3)
        g0, g1 = read(grad, there), read(grad + g_step, k1)
        g2, g3 = read(grad + 2 * g_step, k2), read(grad + 3 * g_step, k3)
        g0, g1, g2, g3 = slopes(g0, g1, g2, g3, bias, t0, t1, t2, t3, n0, n1, n2, n3, x1, x2, x3, WIDTH, SILU)
        if sums_ptr is not None:
            g1, g2, g3 = of_known(g1, k1, WHOLE), of_known(g2, k2, WHOLE), of_known(g3, k3, WHOLE)
            of_bias += (g0 + g1) + (g2 + g3)
            of_t0, of_t1, of_t2, of_t3 = with_products(
                of_t0, of_t1, of_t2, of_t3, g0, g1, g2, g3, n0, n1, n2, n3, x1, x2, x3, k1, k2, k3, WHOLE, WIDTH
            )  # fmt: skip
        if dx_ptr is not None:
            dx = dx_ptr + q * dx_step
            d0 = _of_input(t0, t1, t2, t3, g0, h1, h2, h3, there, there, there, WHOLE, WIDTH)
            d1 = _of_input(t0, t1, t2, t3, g1, g0, h1, h2, k1, there, there, WHOLE, WIDTH)
            d2 = _of_input(t0, t1, t2, t3, g2, g1, g0, h1, k2, k1, there, WHOLE, WIDTH)
            d3 = _of_input(t0, t1, t2, t3, g3, g2, g1, g0, k3, k2, k1, WHOLE, WIDTH)
            # the inputs before the run are another program's
            inner = there & (tl.zeros_like(there).to(tl.int64) + q > first)
            m1, m2 = inner if WIDTH > 2 else there, inner if WIDTH > 3 else there
            tl.store(dx, rounded(d0, dx_ptr), inner)
            tl.store(dx + dx_step, rounded(d1, dx_ptr), _known(m1, q + (2 - WIDTH), positions, WHOLE))
            tl.store(dx + 2 * dx_step, rounded(d2, dx_ptr), _known(m2, q + (3 - WIDTH), positions, WHOLE))
            tl.store(dx + 3 * dx_step, rounded(d3, dx_ptr), _known(there, q + (4 - WIDTH), positions, WHOLE))
        x1, x2, x3, h1, h2, h3 = n3, n2, n1, g3, g2, g1
    if dx_ptr is not None:
        stop = first + (last - first + 3) // 4 * 4
        for k in tl.static_range(WIDTH - 1):
            q = stop + k
            known, k1 = _among(there, q, 0, positions), _among(there, q - 1, 0, positions)
            k2 = _among(there, q - 2, 0, positions)
            n = read(x_ptr + q * x_step, known)
            g = slope(read(grad_ptr + q * g_step, known), taps_of(bias, t0, t1, t2, t3, n, x1, x2, x3, WIDTH), SILU)
            d = _of_input(t0, t1, t2, t3, g, h1, h2, h3, known, k1, k2, False, WIDTH)
            tl.store(dx_ptr + q * dx_step, rounded(d, dx_ptr), _among(there, q - (WIDTH - 1), 0, last))
            x1, x2, x3, h1, h2, h3 = n, x1, x2, g, h1, h2
    if sums_ptr is not None:
        sums_ptr += ((batch * tiles_s + tl.program_id(0) % tiles_s) * channels + c) * (WIDTH + 1)
        tl.store(sums_ptr + (WIDTH - 1), of_t0, there)
        tl.store(sums_ptr + (WIDTH - 2), of_t1, there)
        if WIDTH > 2:
            tl.store(sums_ptr + (WIDTH - 3), of_t2, there)
        if WIDTH > 3:
            tl.store(sums_ptr + (WIDTH - 4), of_t3, there)
        tl.store(sums_ptr + WIDTH, of_bias, there)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def _place(channels, tiles_c, tiles_s, CHANNELS: tl.constexpr, RUN: tl.constexpr, EVEN: tl.constexpr):
    """Return the channels of this program, which of them exist, its first position, and its batch."""
    pid = tl.program_id(0)
    c = (pid // tiles_s % tiles_c).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    there = tl.full([CHANNELS], 1, tl.int1) if EVEN else c < channels
    return c, there, (pid % tiles_s).to(tl.int64) * RUN, (pid // (tiles_c * tiles_s)).to(tl.int64)


@triton.jit
def _weights(weight_ptr, bias_ptr, c, there, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the bias, and the weights of the input of a position, of the one before it, and so on."""
    bias = tl.zeros([CHANNELS], tl.float32)
    if bias_ptr is not None:
        bias = read(bias_ptr + c, there)
    weight_ptr += c * WIDTH + (WIDTH - 1)
    t0, t1 = read(weight_ptr, there), read(weight_ptr - 1, there)
    t2 = read(weight_ptr - 2, there) if WIDTH > 2 else t0
    t3 = read(weight_ptr - 3, there) if WIDTH > 3 else t0
    return bias, t0, t1, t2, t3


@triton.jit
def _among(there, p, low, high):
    """Return ``there`` for a number from low to below high, else False; the interpreter has no mask of one number."""
    p = tl.zeros_like(there).to(tl.int64) + p
    return there & (p >= low) & (p < high)


@triton.jit
def _known(there, p, positions, WHOLE: tl.constexpr):
    """Return which elements exist of a position; WHOLE: it does."""
    return there if WHOLE else _among(there, p, 0, positions)


@triton.jit
def taps_of(bias, t0, t1, t2, t3, x0, x1, x2, x3, WIDTH: tl.constexpr):
    """Return the sum of the taps, in the order of ``_conv_forward``."""
    z = bias
    if WIDTH > 3:
        z += x3 * t3
    if WIDTH > 2:
        z += x2 * t2
    return z + x1 * t1 + x0 * t0


@triton.jit
def output_of(z, SILU: tl.constexpr):
    if SILU:
        s, _ = logistic(z)
        z = times(z, s)
    return z


@triton.jit
def slope(grad, z, SILU: tl.constexpr):
    """Return the gradient of the sum of the taps ``z``: of silu, grad * (s + z * s * (1 - s))."""
    if SILU:
        e = tl.exp2(-1.4426950408889634 * tl.abs(z))
        r = reciprocal(1.0 + e)
        grad *= tl.where(z > 0, r, e * r) + times(z, e * r * r)
    return grad


@triton.jit
def slopes(
    g0, g1, g2, g3, bias, t0, t1, t2, t3, n0, n1, n2, n3, x1, x2, x3, WIDTH: tl.constexpr, SILU: tl.constexpr
):  # fmt: skip
    """Return the gradients of the sums of the taps of four positions, whose inputs come after x3, x2, x1."""
    g0 = slope(g0, taps_of(bias, t0, t1, t2, t3, n0, x1, x2, x3, WIDTH), SILU)
    g1 = slope(g1, taps_of(bias, t0, t1, t2, t3, n1, n0, x1, x2, WIDTH), SILU)
    g2 = slope(g2, taps_of(bias, t0, t1, t2, t3, n2, n1, n0, x1, WIDTH), SILU)
    return g0, g1, g2, slope(g3, taps_of(bias, t0, t1, t2, t3, n3, n2, n1, n0, WIDTH), SILU)


@triton.jit
def of_known(h, known, SURE: tl.constexpr):
    """Return numbers, 0 where they are not known."""
    return h if SURE else tl.where(known, h, 0.0)


@triton.jit
def plus(total, a, b, known, SURE: tl.constexpr):
    """Return ``total + a * b``, without the product where it is not known: not inf * 0."""
    return total + of_known(a * b, known, SURE)


@triton.jit
def with_products(
    of_t0, of_t1, of_t2, of_t3, g0, g1, g2, g3, n0, n1, n2, n3, x1, x2, x3, k1, k2, k3,
    SURE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the sums of the taps' gradients with those of four positions, as ``slopes`` has them."""
    of_t0 = plus(plus(plus(of_t0 + g0 * n0, g1, n1, k1, SURE), g2, n2, k2, SURE), g3, n3, k3, SURE)
    of_t1 = plus(plus(plus(of_t1 + g0 * x1, g1, n0, k1, SURE), g2, n1, k2, SURE), g3, n2, k3, SURE)
    if WIDTH > 2:
        of_t2 = plus(plus(plus(of_t2 + g0 * x2, g1, x1, k1, SURE), g2, n0, k2, SURE), g3, n1, k3, SURE)
    if WIDTH > 3:
        of_t3 = plus(plus(plus(of_t3 + g0 * x3, g1, x2, k1, SURE), g2, x1, k2, SURE), g3, n0, k3, SURE)
    return of_t0, of_t1, of_t2, of_t3


@triton.jit
def _of_input(
    t0, t1, t2, t3, h0, h1, h2, h3, known, known_1, known_2, SURE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Return the gradient of the input WIDTH - 1 positions before that of ``h0``. Without SURE, the last may not be."""
    if WIDTH == 4:
        d = plus(plus(h3 * t0, h2, t1, known_2, SURE), h1, t2, known_1, SURE)
        return plus(d, h0, t3, known, SURE)
    if WIDTH == 3:
        return plus(plus(h2 * t0, h1, t1, known_1, SURE), h0, t2, known, SURE)
    return plus(h1 * t0, h0, t1, known, SURE)

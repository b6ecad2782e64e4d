"""The gradients of the causal convolution in Triton. ``_causal_conv.py`` has what both kernels share.

A program has a tile of some channels and positions. It computes the sum of the taps again, for the W positions whose
outputs an input has a part in, and adds up the gradients of weight and bias over its positions; ``add_sums`` adds
these, in a fixed order. There are no atomics: the same input gives the same bits. The gradient of the initial state is
a kernel of its own: the first W - 1 positions of each sequence.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from fusedops.ops.convolution.arguments import CausalConv1dGradArgs
from fusedops.ops.convolution.formulas import SILU as SILU_NAME
from fusedops_triton._jit._bias import add_sums, rounded
from fusedops_triton._jit._common import widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.convolution._causal_conv import (
    conv_steps,
    conv_tile,
    empty_in_order,
    in_order,
    input_of,
    inside_of,
    packed_sequences,
    place_of,
    positions_of,
    sequence_of,
    weight_of,
    with_steps,
)
from fusedops_triton.convolution._causal_conv_octets import octets_backward_launch, takes_octets
from fusedops_triton.convolution._causal_conv_walk import common_unit, slope, takes_walk, walk_backward, walk_launch
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div, power_of_two
from fusedops_triton.norms._norm import ready

# ---------------------------------------------------------------------------------------------------------- launchers


def causal_conv1d_backward(a: CausalConv1dGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x and the sums in one pass; those of the initial state by a kernel of their own."""
    of_state = a.grad_state if a.return_state else None
    return conv_backward(
        a.grad_y, of_state, a.x, a.weight, a.bias, a.initial_state, a.cu_seqlens, a.activation, a.needs
    )


def conv_backward(
    grad_y: Tensor,
    grad_state: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weight, bias and initial_state, in their dtypes; None for one that is not wanted.

    Args:
        grad_y: (B, C, S), the gradient of y, any strides.
        grad_state: the gradient of the state, any strides; None where it was not wanted.
        x: as in the forward.
        weight: as in the forward.
        bias: as in the forward.
        initial_state: as in the forward.
        cu_seqlens: as in the forward.
        activation: as in the forward.
        needs: the gradients to compute.
    """
    packed = packed_sequences(cu_seqlens, x)
    x, by_channel = with_steps(x)
    grad_y = in_order(grad_y, by_channel)
    dx = empty_in_order(x, by_channel) if needs[0] else None
    own, offset, before, of_state = ready(weight), ready(bias), ready(initial_state), ready(grad_state)
    silu, (channels, width) = activation == SILU_NAME, weight.shape
    other = 2 if by_channel else 1
    dweight, dbias, dinitial = None, None, None
    sums_wanted = needs[1] or (needs[2] and bias is not None)
    sums = torch.zeros((channels, width + 1), dtype=torch.float32, device=x.device) if sums_wanted else None
    if x.numel() and (dx is not None or sums is not None):
        y_steps = (0, 0) if dx is None else (dx.stride(0), dx.stride(other))
        steps = (x.stride(0), x.stride(other), grad_y.stride(0), grad_y.stride(other), *y_steps)
        alone = packed is None and before is None and of_state is None
        octets = alone and not by_channel and grad_y.dtype.itemsize == 2 and takes_octets(x, width, steps, 16)
        walks = alone and by_channel and takes_walk(width)
        if octets:
            launch, parts = octets_backward_launch(tuple(x.shape), width, steps, silu)
        elif walks:
            launch, parts = walk_launch(walk_backward, tuple(x.shape), width, steps, silu)
        else:
            launch, parts = _backward_launch(tuple(x.shape), width, steps, silu, by_channel)
        of_parts = None if sums is None else torch.empty((parts, sums.numel()), dtype=torch.float32, device=x.device)
        of_sequences = () if octets or walks else (before, of_state, *positions_of(packed))
        launch(x, dx, of_parts, grad_y, x, own, offset, *of_sequences)
        if sums is not None and of_parts is not None:
            add_sums(sums, of_parts)
    if sums is not None:
        dweight = sums[:, :width].to(weight.dtype).contiguous() if needs[1] else None
        dbias = sums[:, width].to(bias.dtype).contiguous() if needs[2] and bias is not None else None
    if initial_state is not None and needs[3]:
        dinitial = torch.empty(initial_state.shape, dtype=initial_state.dtype, device=x.device)
        if dinitial.numel():
            steps = (x.stride(0), x.stride(other), grad_y.stride(0), grad_y.stride(other))
            launch = _before_launch(tuple(dinitial.shape), x.shape[2], steps, silu, by_channel)
            bounds = (None, None) if packed is None else (packed.first, packed.length)
            launch(x, dinitial, grad_y, x, own, offset, before, of_state, *bounds)
    return dx, dweight, dbias, dinitial


@cached_by_layout
def _backward_launch(
    shape: tuple[int, int, int], width: int, steps: tuple[int, ...], silu: bool, by_channel: bool
) -> tuple[Launch, int]:
    """Return the launch for (B, C, S), and its rows of sums. steps: of x, grad and dx."""
    batch, channels, positions = shape
    tile = conv_tile(channels, positions, by_channel, True)
    repeats = conv_steps(positions, tile)
    tiles = (ceil_div(channels, tile.channels), ceil_div(positions, tile.positions * repeats))
    unit_s = common_unit(steps) if by_channel else 1
    constants = {
        "WIDTH": width, "SILU": silu, "BY_CHANNEL": by_channel, "CHANNELS": tile.channels,
        "POSITIONS": tile.positions, "SUMS": power_of_two(width + 1), "UNIT": unit_s,
        "EVEN": channels % tile.channels == 0,
    }  # fmt: skip
    grid = (batch * tiles[0] * tiles[1],)
    sizes = (*(step // unit_s for step in steps), channels, positions, *tiles, repeats)
    return Launch(_conv_backward, grid, sizes, constants, tile.warps), batch * tiles[1]


@cached_by_layout
def _before_launch(
    shape: tuple[int, int, int], positions: int, steps: tuple[int, ...], silu: bool, by_channel: bool
) -> Launch:
    """Return the launch for an initial state (N, C, W - 1). steps: of x and grad."""
    sequences, channels, kept = shape
    block = min(power_of_two(channels), 128)
    constants = {
        "WIDTH": kept + 1, "SILU": silu, "BY_CHANNEL": by_channel, "CHANNELS": block,
    }  # fmt: skip
    tiles = ceil_div(channels, block)
    return Launch(_conv_before, (sequences * tiles,), (*steps, channels, positions, tiles), constants, 4)


# ------------------------------------------------------------------------------------------------------------ kernels


@profiled(
    do_not_specialize=[
        "x_batch", "x_step", "g_batch", "g_step", "dx_batch", "dx_step",
        "channels", "positions", "tiles_c", "tiles_s", "steps",
    ]
)  # fmt: skip
def _conv_backward(
    dx_ptr, sums_ptr, grad_ptr, x_ptr, weight_ptr, bias_ptr, before_ptr, grad_state_ptr,
    sequence_ptr, start_ptr, end_ptr,
    x_batch, x_step, g_batch, g_step, dx_batch, dx_step, channels, positions, tiles_c, tiles_s, steps,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BY_CHANNEL: tl.constexpr, CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr, SUMS: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute ``steps`` tiles of (CHANNELS, POSITIONS). Grid (B * tiles_c * tiles_s,).

    dx_ptr: (B, channels, positions), or None. sums_ptr: (B * tiles_s, channels, WIDTH + 1), the sums over the positions
    of this program for weight, then bias; or None. grad_state_ptr: as before_ptr, or None. The rest is as in forward.
    """
    pid = tl.program_id(0)
    batch = (pid // (tiles_c * tiles_s)).to(tl.int64)
    c = (pid // tiles_s % tiles_c).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    x_step *= UNIT
    g_step *= UNIT
    dx_step *= UNIT
    x_ptr += batch * x_batch * UNIT
    grad_ptr += batch * g_batch * UNIT
    bias = tl.zeros([CHANNELS], dtype=tl.float32)
    if bias_ptr is not None:
        bias = widened(tl.load(bias_ptr + c, mask=c < channels, other=0.0))
    column = tl.arange(0, SUMS)
    sums = tl.zeros([CHANNELS, SUMS], dtype=tl.float32)
    part = (pid % tiles_s).to(tl.int64)
    for step in range(steps):
        p = (part * steps + step) * POSITIONS + tl.arange(0, POSITIONS)
        sequence, start, end = sequence_of(batch, p, sequence_ptr, start_ptr, end_ptr, positions)
        inside = inside_of(c, p, channels, positions, EVEN)
        dx = tl.zeros([CHANNELS, POSITIONS], dtype=tl.float32)
        for k in tl.static_range(WIDTH):  # the output k positions on
            known = inside & (p + k < end)[None, :]
            at = place_of(c[:, None], (p + k)[None, :], g_step, BY_CHANNEL)
            h = widened(tl.load(grad_ptr + at, mask=known, other=0.0))
            if SILU:
                z = tl.zeros([CHANNELS, POSITIONS], dtype=tl.float32) + bias[:, None]
                for w in tl.static_range(WIDTH):
                    value = input_of(
                        x_ptr, before_ptr, c, p + (k + w - (WIDTH - 1)), sequence, start, end, x_step, channels, inside,
                        WIDTH, BY_CHANNEL,
                    )  # fmt: skip
                    z += value * weight_of(weight_ptr, c, channels, w, WIDTH)
                h = tl.where(known, slope(h, z, SILU), 0.0)
            # not inf * 0 beyond the end of a sequence
            dx += tl.where(known, h * weight_of(weight_ptr, c, channels, WIDTH - 1 - k, WIDTH), 0.0)
            if k == 0 and sums_ptr is not None:
                for w in tl.static_range(WIDTH):
                    value = input_of(
                        x_ptr, before_ptr, c, p + (w - (WIDTH - 1)), sequence, start, end, x_step, channels, inside,
                        WIDTH, BY_CHANNEL,
                    )  # fmt: skip
                    product = tl.sum(tl.where(known, h * value, 0.0), axis=1)
                    sums += tl.where((column == w)[None, :], product[:, None], 0.0)
                sums += tl.where((column == WIDTH)[None, :], tl.sum(h, axis=1)[:, None], 0.0)
        if dx_ptr is not None:
            if grad_state_ptr is not None:
                k = p - (end - (WIDTH - 1))
                row = (sequence * channels)[None, :] + c[:, None]
                last = inside & ((k >= 0) & (p < end))[None, :]
                of_state = tl.load(grad_state_ptr + row * (WIDTH - 1) + k[None, :], mask=last, other=0.0)
                dx += widened(of_state)
            at = place_of(c[:, None], p[None, :], dx_step, BY_CHANNEL)
            tl.store(dx_ptr + batch * dx_batch * UNIT + at, rounded(dx, dx_ptr), mask=inside)
    if sums_ptr is not None:
        to = ((batch * tiles_s + part) * channels + c) * (WIDTH + 1)
        wanted = (c < channels)[:, None] & (column <= WIDTH)[None, :]
        tl.store(sums_ptr + to[:, None] + column[None, :], sums, mask=wanted)


@profiled(do_not_specialize=["x_batch", "x_step", "g_batch", "g_step", "channels", "positions", "tiles_c"])
def _conv_before(
    dbefore_ptr, grad_ptr, x_ptr, weight_ptr, bias_ptr, before_ptr, grad_state_ptr, first_ptr, length_ptr,
    x_batch, x_step, g_batch, g_step, channels, positions, tiles_c,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BY_CHANNEL: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the initial state, of one sequence and CHANNELS channels. Grid (sequences * tiles_c,).

    dbefore_ptr: (sequences, channels, WIDTH - 1). first_ptr, length_ptr: (sequences,), or None. The others: see above.
    """
    pid = tl.program_id(0)
    sequence = (pid // tiles_c).to(tl.int64)
    c = (pid % tiles_c).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    known = c < channels
    # vectors, all the same: the interpreter makes no mask of one number
    if first_ptr is not None:
        same = sequence + c * 0
        start, length = tl.load(first_ptr + same), tl.load(length_ptr + same)
    else:
        start, length = c * 0, c * 0 + positions
        x_ptr += sequence * x_batch
        grad_ptr += sequence * g_batch
    row = (sequence * channels + c) * (WIDTH - 1)
    bias = tl.zeros([CHANNELS], dtype=tl.float32)
    if bias_ptr is not None:
        bias = widened(tl.load(bias_ptr + c, mask=known, other=0.0))
    for k in tl.static_range(WIDTH - 1):
        total = tl.zeros([CHANNELS], dtype=tl.float32)
        if grad_state_ptr is not None:
            total += widened(tl.load(grad_state_ptr + row + (k - length), mask=known & (k >= length), other=0.0))
        for j in tl.static_range(k + 1):  # the output at this position, by tap k - j
            there = known & (j < length)
            h = widened(tl.load(grad_ptr + place_of(c, start + j, g_step, BY_CHANNEL), mask=there, other=0.0))
            if SILU:
                z = bias
                for w in tl.static_range(WIDTH):
                    if j + w < WIDTH - 1:
                        value = tl.load(before_ptr + row + (j + w), mask=there, other=0.0)
                    else:
                        at = place_of(c, start + (j + w - (WIDTH - 1)), x_step, BY_CHANNEL)
                        value = tl.load(x_ptr + at, mask=there, other=0.0)
                    factor = widened(tl.load(weight_ptr + c * WIDTH + w, mask=known, other=0.0))
                    z += widened(value) * factor
                h = slope(h, z, SILU)
            factor = widened(tl.load(weight_ptr + c * WIDTH + (k - j), mask=known, other=0.0))
            total += tl.where(there, h * factor, 0.0)
        tl.store(dbefore_ptr + row + k, rounded(total, dbefore_ptr), mask=known)

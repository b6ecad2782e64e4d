"""The causal convolution in Triton, forward. ``_causal_conv_backward.py`` has the gradients.

Without packed sequences and states, ``_causal_conv_walk.py`` has the kernels for channels that are next to each other,
and ``_causal_conv_octets.py`` the forward of aligned positions.
Else a program has a tile of some channels and positions. It loads the input of each tap at its own offset: all but the
first load of an element are answered by the L1 cache. Positions are next to each other in memory, or channels:
BY_CHANNEL, and the elements from one to the next of the other kind are ``step``. Packed sequences come as three rows of
numbers for the positions: the sequence of each, its first position and its end.

The arithmetic is in float32 and rounded once.
Offsets are 64-bit.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.ops.convolution.arguments import CausalConv1dArgs, check_bounds, empty_state
from fusedops.ops.convolution.formulas import SILU as SILU_NAME
from fusedops.ops.convolution.formulas import Packed, final_state, packed_of
from fusedops_triton._jit._bias import rounded
from fusedops_triton._jit._common import widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.convolution._causal_conv_octets import octets_launch, takes_octets
from fusedops_triton.convolution._causal_conv_walk import common_unit, takes_walk, walk_forward, walk_launch
from fusedops_triton.gated._gated import logistic, times
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import FLAT_THREADS, ceil_div, power_of_two, warps_for
from fusedops_triton.norms._norm import ready


class Positions(NamedTuple):
    """The packed sequences for kernels, each (S,) int32; None where each batch is one sequence."""

    sequence: Tensor | None
    start: Tensor | None
    end: Tensor | None


# ----------------------------------------------------------------------------------------------------------- settings


class ConvTile(NamedTuple):
    """The setting of a kernel that works on tiles of channels and positions."""

    channels: int
    positions: int
    warps: int


#: Elements per thread of 128 threads, and the longest side of a tile, along memory: of forward and backward, where
#: positions are next to each other and where channels are. On an H200 at (2, 8192, 8192) in bfloat16, in percent of the
#: speed of a copy: 51 and 13, 63 and 17. The instructions of the taps are the limit, not memory.
TILES = {
    (False, False): (8, 1024), (False, True): (4, 512),
    (True, False): (16, 256), (True, True): (2, 256),
}  # fmt: skip
#: The most rows of sums for the gradient of the weight: a program goes through as many tiles as that takes.
CONV_PARTS = 64


def causal_conv1d(a: CausalConv1dArgs) -> tuple[Tensor, Tensor]:
    """Compute the op for any strides and dtypes. The state is copied by torch."""
    return conv_forward(*a)


def conv_tile(channels: int, positions: int, by_channel: bool, backward: bool) -> ConvTile:
    """Return the setting for (B, channels, positions). by_channel: channels are next to each other in memory."""
    per_thread, longest = TILES[by_channel, backward]
    elements = FLAT_THREADS * per_thread
    along, across = (channels, positions) if by_channel else (positions, channels)
    side = min(power_of_two(along), longest, elements)
    other = min(power_of_two(across), elements // side)
    warps = warps_for(side * other, per_thread)
    return ConvTile(side, other, warps) if by_channel else ConvTile(other, side, warps)


def conv_steps(positions: int, tile: ConvTile) -> int:
    """Return the tiles that a program of the backward goes through, one after the other."""
    return ceil_div(ceil_div(positions, tile.positions), CONV_PARTS)


# ---------------------------------------------------------------------------------------------------------- launchers


def conv_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    initial_state: Tensor | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute y in the order of x in memory, and the state, (0,) where it is not wanted.

    Args:
        x: (B, C, S), float16, bfloat16 or float32, any strides.
        weight: (C, W), any of these dtypes, any strides.
        bias: (C,), any of these dtypes, any strides; or None.
        activation: "none" or "silu".
        initial_state: (B or N, C, W - 1), the dtype of x, any strides; or None.
        return_state: True where the state is wanted.
        cu_seqlens: (N + 1,), int32 or int64; or None.
    """
    packed = packed_sequences(cu_seqlens, x)
    x, by_channel = with_steps(x)
    y, before = empty_in_order(x, by_channel), ready(initial_state)
    if y.numel():
        steps = (x.stride(0), x.stride(2 if by_channel else 1), y.stride(0), y.stride(2 if by_channel else 1))
        silu, width = activation == SILU_NAME, weight.shape[1]
        alone = packed is None and before is None
        if alone and not by_channel and takes_octets(x, width, steps):
            launch = octets_launch(tuple(x.shape), width, steps, silu)
            launch(x, y, x, ready(weight), ready(bias))
        elif alone and by_channel and takes_walk(width):
            launch, _ = walk_launch(walk_forward, tuple(x.shape), width, steps, silu)
            launch(x, y, x, ready(weight), ready(bias))
        else:
            launch = _forward_launch(tuple(x.shape), width, steps, silu, by_channel)
            launch(x, y, x, ready(weight), ready(bias), before, *positions_of(packed))
    if not return_state:
        return y, empty_state(x, weight, False, None)
    own = x if packed is not None else x[..., max(x.shape[2] - (weight.shape[1] - 1), 0) :]
    return y, final_state(own, weight.shape[1], before, packed).contiguous()


def packed_sequences(cu_seqlens: Tensor | None, x: Tensor) -> Packed | None:
    check_bounds(cu_seqlens, x.shape[2])
    return None if cu_seqlens is None else packed_of(cu_seqlens, x.shape[2])


def positions_of(packed: Packed | None) -> Positions:
    """Return the three rows; a position of no sequence has an end of 0."""
    if packed is None:
        return Positions(None, None, None)
    number = packed.sequence.clamp(max=max(packed.length.shape[0] - 1, 0))
    start = torch.arange(number.shape[0], device=number.device) - packed.offset
    lengths = packed.length if packed.length.shape[0] else packed.length.new_zeros(1)
    end = (start + lengths[number]).masked_fill(~packed.inside, 0)
    return Positions(number.int(), start.int(), end.int())


def with_steps(x: Tensor) -> tuple[Tensor, bool]:
    """Return x, or a copy, and True where its channels are next to each other, and not its positions."""
    by_channel = x.stride(2) != 1 and x.stride(1) == 1
    return in_order(x, by_channel), by_channel


def in_order(x: Tensor, by_channel: bool) -> Tensor:
    if x.stride(1 if by_channel else 2) == 1 and not x.is_neg():
        return x
    x = x.resolve_neg()
    return x.mT.contiguous().mT if by_channel else x.contiguous()


def empty_in_order(x: Tensor, by_channel: bool) -> Tensor:
    """Return an empty result in the order of x in memory, its channels next to each other, else its positions."""
    result = torch.empty_like(x)
    if result.stride(1 if by_channel else 2) == 1:
        return result
    return torch.empty_like(x.mT, memory_format=torch.contiguous_format).mT if by_channel else x.new_empty(x.shape)


@cached_by_layout
def _forward_launch(
    shape: tuple[int, int, int], width: int, steps: tuple[int, ...], silu: bool, by_channel: bool
) -> Launch:
    """Return the launch for (B, C, S). steps: of x and y, from one batch and one row to the next."""
    batch, channels, positions = shape
    tile = conv_tile(channels, positions, by_channel, False)
    tiles = (ceil_div(channels, tile.channels), ceil_div(positions, tile.positions))
    unit_s = common_unit(steps) if by_channel else 1  # the inputs of taps begin anywhere among positions
    constants = {
        "WIDTH": width, "SILU": silu, "BY_CHANNEL": by_channel, "CHANNELS": tile.channels,
        "POSITIONS": tile.positions, "UNIT": unit_s, "EVEN": channels % tile.channels == 0,
    }  # fmt: skip
    grid = (batch * tiles[0] * tiles[1],)
    sizes = (*(step // unit_s for step in steps), channels, positions, *tiles)
    return Launch(_conv_forward, grid, sizes, constants, tile.warps)


# ------------------------------------------------------------------------------------------------------------ kernels


@profiled(do_not_specialize=["x_batch", "x_step", "y_batch", "y_step", "channels", "positions", "tiles_c", "tiles_s"])
def _conv_forward(
    y_ptr, x_ptr, weight_ptr, bias_ptr, before_ptr, sequence_ptr, start_ptr, end_ptr,
    x_batch, x_step, y_batch, y_step, channels, positions, tiles_c, tiles_s,
    WIDTH: tl.constexpr, SILU: tl.constexpr, BY_CHANNEL: tl.constexpr, CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute a tile of (CHANNELS, POSITIONS). Grid (B * tiles_c * tiles_s,). EVEN: no tile is cut among channels.

    Steps are in units of UNIT elements, by which the compiler knows the alignment.

    y_ptr, x_ptr: (B, channels, positions). weight_ptr: (channels, WIDTH). bias_ptr: (channels,), or None. before_ptr:
    (sequences, channels, WIDTH - 1), or None. sequence_ptr, start_ptr, end_ptr: (positions,), or None.
    """
    pid = tl.program_id(0)
    batch = (pid // (tiles_c * tiles_s)).to(tl.int64)
    c = (pid // tiles_s % tiles_c).to(tl.int64) * CHANNELS + tl.arange(0, CHANNELS)
    p = (pid % tiles_s).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    sequence, start, end = sequence_of(batch, p, sequence_ptr, start_ptr, end_ptr, positions)
    inside = inside_of(c, p, channels, positions, EVEN)
    x_step *= UNIT
    y_step *= UNIT
    x_ptr += batch * x_batch * UNIT
    z = tl.zeros([CHANNELS, POSITIONS], dtype=tl.float32)
    if bias_ptr is not None:
        z += widened(tl.load(bias_ptr + c, mask=c < channels, other=0.0))[:, None]
    for w in tl.static_range(WIDTH):
        value = input_of(
            x_ptr, before_ptr, c, p + (w - (WIDTH - 1)), sequence, start, end, x_step, channels, inside,
            WIDTH, BY_CHANNEL,
        )  # fmt: skip
        z += value * weight_of(weight_ptr, c, channels, w, WIDTH)
    y = z
    if SILU:
        s, _ = logistic(z)
        y = times(z, s)
    if end_ptr is not None:
        y = tl.where((p < end)[None, :], y, 0.0)
    at = place_of(c[:, None], p[None, :], y_step, BY_CHANNEL)
    tl.store(y_ptr + batch * y_batch * UNIT + at, rounded(y, y_ptr), mask=inside)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def place_of(c, p, step, BY_CHANNEL: tl.constexpr):
    """Return the offset of channels at positions."""
    if BY_CHANNEL:
        return p * step + c
    return c * step + p


@triton.jit
def inside_of(c, p, channels, positions, EVEN: tl.constexpr):
    """Return True for the elements that there are; EVEN: the compiler knows that channels are not cut."""
    if EVEN:
        return tl.full([c.shape[0], 1], 1, tl.int1) & (p < positions)[None, :]
    return (c < channels)[:, None] & (p < positions)[None, :]


@triton.jit
def sequence_of(batch, p, sequence_ptr, start_ptr, end_ptr, positions):
    """Return the sequence of each position, its first position and its end, int64."""
    if start_ptr is not None:
        inside = p < positions
        sequence = tl.load(sequence_ptr + p, mask=inside, other=0).to(tl.int64)
        start = tl.load(start_ptr + p, mask=inside, other=0).to(tl.int64)
        return sequence, start, tl.load(end_ptr + p, mask=inside, other=0).to(tl.int64)
    nothing = p * 0
    return nothing + batch, nothing, nothing + positions


@triton.jit
def input_of(
    x_ptr, before_ptr, c, at, sequence, start, end, x_step, channels, inside,
    WIDTH: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Return the inputs of channels at positions ``at``, of given sequences: before them the state's."""
    own = inside & ((at >= start) & (at < end))[None, :]
    value = widened(tl.load(x_ptr + place_of(c[:, None], at[None, :], x_step, BY_CHANNEL), mask=own, other=0.0))
    if before_ptr is not None:
        row = (sequence * channels)[None, :] + c[:, None]
        k = (at - start + (WIDTH - 1))[None, :]
        absent = inside & (at < start)[None, :] & (k >= 0)
        value += widened(tl.load(before_ptr + row * (WIDTH - 1) + k, mask=absent, other=0.0))
    return value


@triton.jit
def weight_of(weight_ptr, c, channels, w: tl.constexpr, WIDTH: tl.constexpr):
    """Return the weight of a tap, (CHANNELS, 1)."""
    return widened(tl.load(weight_ptr + c * WIDTH + w, mask=c < channels, other=0.0))[:, None]

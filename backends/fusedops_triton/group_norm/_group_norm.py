"""group_norm in Triton, forward and backward.

Kernels see x as (batch, channels, positions) by strides: positions next to each other, or channels. A program has a
tile of channels and of positions that follow each other in memory.

    sums       A program adds up a part of the positions of some channels: forward their mean and the squares of the
               differences from it (Welford 1962), backward the products and the gradients. torch combines the parts and
               the channels of a group, a few numbers, in one order.
    elements   A program computes a part of the positions of some channels, each by the numbers of its channel.

There are no atomics: the same input gives the same bits. The arithmetic is in float32 and rounded once.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.ops.group_norm.arguments import SILU, GroupNormArgs, GroupNormGradArgs
from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import read
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div, power_of_two
from fusedops_triton.norms._gated_norm import activation
from fusedops_triton.norms._norm import ready

_TILE = 1024  # elements of a program at a time
_STEPS = 8  # tiles of a program


class Layout(NamedTuple):
    """The sizes of x, (batch, channels, positions). by_channel: channels are next to each other."""

    batch: int
    channels: int
    positions: int
    by_channel: bool

    @property
    def tile(self) -> tuple[int, int]:
        """The channels and the positions of a tile."""
        if self.by_channel:
            channels = min(power_of_two(self.channels), 64)
            return channels, _TILE // channels
        positions = min(power_of_two(self.positions), _TILE)
        return min(power_of_two(self.channels), _TILE // positions, 8), positions

    @property
    def parts(self) -> int:
        """The parts into which positions are cut."""
        return ceil_div(self.positions, self.tile[1] * _STEPS)


# ---------------------------------------------------------------------------------------------------------- launchers


def group_norm(a: GroupNormArgs, save: bool) -> tuple[Tensor | None, ...]:
    """Compute the op for any rank and dtypes; x of other strides is made contiguous."""
    x, layout = _laid_out(a.x)
    y = torch.empty_like(x)
    if x.numel() == 0:  # a mean of no numbers
        nothing = torch.full((x.shape[0], a.groups), float("nan"), dtype=torch.float32, device=x.device)
        return (y, nothing, nothing.clone()) if save else (y, None, None)
    moments = torch.empty((2, layout.batch, layout.channels, layout.parts), dtype=torch.float32, device=x.device)
    _launch(_channel_moments, layout, False)(x, moments[0], moments[1], x)
    per_part = layout.tile[1] * _STEPS
    counts = [min(per_part, layout.positions - at * per_part) for at in range(layout.parts)]
    mean, rstd = _of_groups(moments, counts, a.groups, a.eps)
    of_channels = _by_channel(torch.stack((mean, rstd)), layout.channels)
    silu = a.activation == SILU
    _launch(_elements_forward, layout, silu)(x, y, x, of_channels[0], of_channels[1], ready(a.weight), ready(a.bias))
    return (y, mean, rstd) if save else (y, None, None)


def group_norm_backward(a: GroupNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weight and bias: the sums of each channel first, then the elements."""
    x, layout = _laid_out(a.x)
    wanted = [each if need else None for each, need in zip((a.weight, a.bias), a.needs[1:])]
    dx = torch.empty_like(x) if a.needs[0] else None
    if x.numel() == 0:
        return dx, *(None if each is None else torch.zeros_like(each) for each in wanted)
    grad = _like(a.grad, layout)
    mean, rstd = _by_channel(torch.stack((a.mean, a.rstd)), layout.channels)
    parts = torch.empty((2, layout.batch, layout.channels, layout.parts), dtype=torch.float32, device=x.device)
    weight, bias, silu = ready(a.weight), ready(a.bias), a.activation == SILU
    _launch(_channel_gradients, layout, silu)(x, parts[0], parts[1], grad, x, mean, rstd, weight, bias)
    sums = parts.sum(-1)  # (2, batch, channels): of grad * normal, and of grad
    if dx is not None:
        weighted = sums if weight is None else sums * weight.float()
        count = layout.channels // a.groups * layout.positions
        of_groups = weighted.view(2, layout.batch, a.groups, -1).sum(-1) / count
        product, center = _by_channel(of_groups, layout.channels)
        launch = _launch(_elements_backward, layout, silu)
        launch(x, dx, grad, x, mean, rstd, product, center, weight, bias)
    of_vectors = sums.sum(1)
    return dx, *(None if each is None else of_vectors[at].to(each.dtype, copy=True) for at, each in enumerate(wanted))


def _laid_out(x: Tensor) -> tuple[Tensor, Layout]:
    """Return x in memory that kernels read, and its layout."""
    batch, channels, positions = x.shape[0], x.shape[1], prod(x.shape[2:])
    by_channel = not x.is_contiguous() and not x.is_neg() and x.movedim(1, -1).is_contiguous()
    return x if by_channel else x.resolve_neg().contiguous(), Layout(batch, channels, positions, by_channel)


def _like(grad: Tensor, layout: Layout) -> Tensor:
    """Return the gradient in the memory order of x."""
    grad = grad.resolve_neg()
    return grad.movedim(1, -1).contiguous().movedim(-1, 1) if layout.by_channel else grad.contiguous()


def _of_groups(moments: Tensor, counts: list[int], groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return the mean and rstd of each group, (batch, groups), from those of the parts of channels."""
    count = torch.tensor(counts, dtype=torch.float32, device=moments.device)
    batch, channels = moments.shape[1:3]
    means, squares = moments.view(2, batch, groups, channels // groups, -1)
    total = float(channels // groups * sum(counts))
    mean = (means * count).sum((-2, -1)) / total
    differences = means - mean[..., None, None]
    variance = (squares + differences * differences * count).sum((-2, -1)) / total
    return mean, torch.rsqrt(variance + eps)


def _by_channel(of_groups: Tensor, channels: int) -> Tensor:
    """Return numbers of groups, (..., groups), for each channel, (..., channels), contiguous."""
    groups = of_groups.shape[-1]
    of_channels = of_groups[..., None].expand(*of_groups.shape, channels // groups)
    return of_channels.reshape(*of_groups.shape[:-1], channels).contiguous()  # of one group reshape returns a view


@cached_by_layout
def _launch(kernel: object, layout: Layout, silu: bool) -> Launch:
    """Return the launch of a kernel. Each has the same grid, sizes and constexprs."""
    channels, positions = layout.tile
    unit_n = unit(layout.channels if layout.by_channel else layout.positions)
    constants = {
        "BY_CHANNEL": layout.by_channel, "SILU": silu, "STEPS": _STEPS, "UNIT": unit_n, "CHANNELS": channels,
        "POSITIONS": positions,
    }  # fmt: skip
    sizes = (
        layout.channels // (unit_n if layout.by_channel else 1),
        layout.positions // (1 if layout.by_channel else unit_n),
    )
    grid = (layout.parts, ceil_div(layout.channels, channels), layout.batch)
    return Launch(kernel, grid, sizes, constants, 4)


# ------------------------------------------------------------------------------------------------------------ kernels
# Grid of each: (parts, cdiv(channels, CHANNELS), batch). x_ptr, y_ptr, grad_ptr, dx_ptr: (batch, channels, positions).
# Of channels and positions, those that are next to each other are passed as a multiple of UNIT. Sums: (batch, channels,
# parts). mean_ptr, rstd_ptr, product_ptr, center_ptr: (batch, channels). weight_ptr, bias_ptr: (channels,), or None.

_NOT_SPECIALIZED = ["channels", "positions"]


@profiled(do_not_specialize=_NOT_SPECIALIZED)
def _channel_moments(
    mean_ptr, squares_ptr, x_ptr, channels, positions,
    BY_CHANNEL: tl.constexpr, SILU: tl.constexpr, STEPS: tl.constexpr, UNIT: tl.constexpr, CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """Compute the mean of a part of the positions of some channels, and the squares of the differences from it."""
    channels, positions = sizes_of(channels, positions, BY_CHANNEL, UNIT)
    mean = tl.zeros([CHANNELS, POSITIONS], dtype=tl.float32)  # of each lane, so far
    squares = tl.zeros([CHANNELS, POSITIONS], dtype=tl.float32)
    count = tl.zeros([CHANNELS, POSITIONS], dtype=tl.float32)
    for step in range(STEPS):
        at, inside = tile_at(step, channels, positions, BY_CHANNEL, STEPS, CHANNELS, POSITIONS)
        x = read(x_ptr + at, inside)
        count += inside.to(tl.float32)
        difference = tl.where(inside, x - mean, 0.0)
        mean += difference / tl.maximum(count, 1.0)
        squares += difference * (x - mean)
    total = tl.maximum(tl.sum(count, axis=1), 1.0)
    center = tl.sum(mean * count, axis=1) / total
    apart = mean - center[:, None]
    store_sums(mean_ptr, center, channels, CHANNELS)
    store_sums(squares_ptr, tl.sum(squares + count * apart * apart, axis=1), channels, CHANNELS)


@profiled(do_not_specialize=_NOT_SPECIALIZED)
def _elements_forward(
    y_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, channels, positions,
    BY_CHANNEL: tl.constexpr, SILU: tl.constexpr, STEPS: tl.constexpr, UNIT: tl.constexpr, CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """Compute y of a part of the positions of some channels."""
    channels, positions = sizes_of(channels, positions, BY_CHANNEL, UNIT)
    mean, rstd, weight, bias = of_channels(mean_ptr, rstd_ptr, weight_ptr, bias_ptr, channels, CHANNELS)
    for step in range(STEPS):
        at, inside = tile_at(step, channels, positions, BY_CHANNEL, STEPS, CHANNELS, POSITIONS)
        z = (read(x_ptr + at, inside) - mean) * rstd * weight + bias
        if SILU:
            z, _ = activation(z, True)
        tl.store(y_ptr + at, rounded(z, y_ptr), mask=inside)


@profiled(do_not_specialize=_NOT_SPECIALIZED)
def _channel_gradients(
    products_ptr, sums_ptr, grad_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, channels, positions,
    BY_CHANNEL: tl.constexpr, SILU: tl.constexpr, STEPS: tl.constexpr, UNIT: tl.constexpr, CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """Sum grad * normal, and grad, over a part of the positions of some channels; grad is that before the silu."""
    channels, positions = sizes_of(channels, positions, BY_CHANNEL, UNIT)
    mean, rstd, weight, bias = of_channels(mean_ptr, rstd_ptr, weight_ptr, bias_ptr, channels, CHANNELS)
    products = tl.zeros([CHANNELS, POSITIONS], dtype=tl.float32)
    sums = tl.zeros([CHANNELS, POSITIONS], dtype=tl.float32)
    for step in range(STEPS):
        at, inside = tile_at(step, channels, positions, BY_CHANNEL, STEPS, CHANNELS, POSITIONS)
        normal, grad = through(grad_ptr, x_ptr, at, inside, mean, rstd, weight, bias, SILU)
        products += tl.where(inside, grad * normal, 0.0)
        sums += grad
    store_sums(products_ptr, tl.sum(products, axis=1), channels, CHANNELS)
    store_sums(sums_ptr, tl.sum(sums, axis=1), channels, CHANNELS)


@profiled(do_not_specialize=_NOT_SPECIALIZED)
def _elements_backward(
    dx_ptr, grad_ptr, x_ptr, mean_ptr, rstd_ptr, product_ptr, center_ptr, weight_ptr, bias_ptr, channels, positions,
    BY_CHANNEL: tl.constexpr, SILU: tl.constexpr, STEPS: tl.constexpr, UNIT: tl.constexpr, CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """Compute dx of a part of the positions of some channels."""
    channels, positions = sizes_of(channels, positions, BY_CHANNEL, UNIT)
    mean, rstd, weight, bias = of_channels(mean_ptr, rstd_ptr, weight_ptr, bias_ptr, channels, CHANNELS)
    product, center, _, _ = of_channels(product_ptr, center_ptr, None, None, channels, CHANNELS)
    for step in range(STEPS):
        at, inside = tile_at(step, channels, positions, BY_CHANNEL, STEPS, CHANNELS, POSITIONS)
        normal, grad = through(grad_ptr, x_ptr, at, inside, mean, rstd, weight, bias, SILU)
        dx = (grad * weight - normal * product - center) * rstd
        tl.store(dx_ptr + at, rounded(dx, dx_ptr), mask=inside)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def sizes_of(channels, positions, BY_CHANNEL: tl.constexpr, UNIT: tl.constexpr):
    """Return the sizes, of which one was divided by UNIT: the compiler knows its multiple so."""
    if BY_CHANNEL:
        channels = channels * UNIT
    else:
        positions = positions * UNIT
    return channels, positions


@triton.jit
def tile_at(
    step, channels, positions, BY_CHANNEL: tl.constexpr, STEPS: tl.constexpr, CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """Return the offsets of a tile in x, (CHANNELS, POSITIONS), and which of its elements exist."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    position = (tl.program_id(0).to(tl.int64) * STEPS + step) * POSITIONS + tl.arange(0, POSITIONS)
    inside = (channel < channels)[:, None] & (position < positions)[None, :]
    start = tl.program_id(2).to(tl.int64) * channels * positions
    if BY_CHANNEL:
        at = start + channel[:, None] + position[None, :] * channels
    else:
        at = start + channel[:, None].to(tl.int64) * positions + position[None, :]
    return at, inside


@triton.jit
def of_channels(first_ptr, second_ptr, weight_ptr, bias_ptr, channels, CHANNELS: tl.constexpr):
    """Return the numbers of the program's channels, each (CHANNELS, 1): two of the sample, weight and bias."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    at = tl.program_id(2).to(tl.int64) * channels + channel
    weight = tl.full([CHANNELS], 1.0, tl.float32)
    bias = tl.zeros([CHANNELS], dtype=tl.float32)
    if weight_ptr is not None:
        weight = read(weight_ptr + channel, exists)
    if bias_ptr is not None:
        bias = read(bias_ptr + channel, exists)
    return read(first_ptr + at, exists)[:, None], read(second_ptr + at, exists)[:, None], weight[:, None], bias[:, None]


@triton.jit
def through(grad_ptr, x_ptr, at, inside, mean, rstd, weight, bias, SILU: tl.constexpr):
    """Return the normalized numbers, and the gradient of what comes before the silu."""
    normal = (read(x_ptr + at, inside) - mean) * rstd
    grad = read(grad_ptr + at, inside)
    if SILU:
        _, slope = activation(normal * weight + bias, True)
        grad *= slope
    return normal, grad


@triton.jit
def store_sums(sums_ptr, values, channels, CHANNELS: tl.constexpr):
    """Write a number of each of the program's channels, (batch, channels, parts)."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    at = (tl.program_id(2).to(tl.int64) * channels + channel) * tl.num_programs(0) + tl.program_id(0)
    tl.store(sums_ptr + at, values, mask=channel < channels)

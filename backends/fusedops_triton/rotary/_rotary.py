"""Rotary position embedding in Triton: one launcher and one kernel, for q and k in one launch.

- A row is one head of one position. A program has the same few positions of several heads, so that the rows of cos and
  sin, one entry for each pair and in float32 twice the bytes of a row of q, come from the L1 cache for all but one.
- Programs of one position follow each other: from memory, cos and sin are read once.
- q and k are read by their strides, as transformers' are views with the heads and the positions exchanged, and so are
  cos and sin, which models keep doubled; only the last dim is made contiguous.
- Interleaved pairs are loaded and stored together, 16 bytes at a time, and separated in registers.
- The arithmetic is in float32. cos and sin are not rounded.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import read
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ROTARY_HEADS, ceil_div, power_of_two, rotary_tile

# ---------------------------------------------------------------------------------------------------------- launchers


def rotary_embedding(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int
) -> tuple[Tensor, Tensor]:
    """Compute the op for any shape and strides, for q and k in one launch."""
    rotated_q, rotated_k = rotate(q, k, cos, sin, interleaved, seq_dim)
    return rotated_q, q.new_empty(0) if rotated_k is None else rotated_k


def rotary_embedding_backward(
    grad_rotated_q: Tensor,
    grad_rotated_k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    seq_dim: int,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of q and k: the rotation by the opposite angles, in one launch."""
    wanted = [grad for grad, need in zip((grad_rotated_q, grad_rotated_k), needs) if need]
    if not wanted:
        return None, None
    first, second = rotate(wanted[0], wanted[1] if len(wanted) > 1 else None, cos, sin, interleaved, seq_dim, False)
    return (first, second) if needs[0] else (None, first)


def rotate(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int, forward: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Rotate the pairs of q and of k.

    Args:
        q: (..., Nq, S, D), or (..., S, Nq, D) with seq_dim -3, float16, bfloat16 or float32, any strides.
        k: the same with its own number of heads, any of these dtypes, or None.
        cos: (..., S, R/2), any of these dtypes.
        sin: the same.
        interleaved: a pair is an even element and the next one.
        seq_dim: the dim of S.
        forward: False rotates by the opposite angles.

    Returns:
        q and k, rotated, of their shapes and dtypes, contiguous; None for a k that is None.
    """
    given = [x for x in (q, k) if x is not None]
    out = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
    half = cos.shape[-1]
    turned = [(y, x) for y, x in zip(out, given) if y.numel()]
    if half and turned:
        _launch_on([y for y, _ in turned], [_as_4d(x) for _, x in turned], cos, sin, interleaved, seq_dim, forward)
    elif turned:
        for y, x in turned:
            y.copy_(x)
    return out[0], None if k is None else out[1]


def _launch_on(
    out: list[Tensor], given: list[Tensor], cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int, forward: bool
) -> None:
    cos, sin = _angles(cos, out[0]), _angles(sin, out[0])
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    heads_dim = 1 if seq_dim == -2 else 2
    # batch, head, position
    strides = [(x.stride(0), x.stride(heads_dim), x.stride(3 - heads_dim)) for x in given]
    batch, dim = given[0].shape[0], given[0].shape[3]
    length, heads = given[0].shape[3 - heads_dim], tuple([x.shape[heads_dim] for x in given])
    angle_strides = (cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1))
    narrowest = min(x.element_size() for x in given)
    launch = _launch(
        batch, heads, length, dim, cos.shape[2], tuple(strides), angle_strides, interleaved, seq_dim, forward,
        narrowest,
    )  # fmt: skip
    second = (out[1], given[1]) if len(given) > 1 else (None, None)
    launch(out[0], out[0], second[0], given[0], second[1], cos, sin)


def _as_4d(x: Tensor) -> Tensor:
    """Return (B, mid, inner, D) with contiguous rows, copied only where leading dims or rows need it."""
    x = x.resolve_neg()
    return (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()).reshape(-1, *x.shape[-3:])


def _angles(angle: Tensor, y: Tensor) -> Tensor:
    """Return cos or sin as (B, S, R/2) or (1, S, R/2) with contiguous rows. y has the shape of the call."""
    angle = angle.resolve_neg()
    if any(size != 1 for size in angle.shape[:-2]):
        angle = angle.expand(*y.shape[:-3], *angle.shape[-2:])
    angle = angle.reshape(-1, *angle.shape[-2:])
    return angle if angle.stride(-1) == 1 or angle.shape[-1] == 1 else angle.contiguous()


@cached_by_layout
def _launch(
    batch: int, heads: tuple[int, ...], length: int, dim: int, half: int, strides: tuple[tuple[int, ...], ...],
    angle_strides: tuple[int, ...], interleaved: bool, seq_dim: int, forward: bool, narrowest: int,
) -> Launch:  # fmt: skip
    """Return the launch of ``_rotate`` for q of (B, heads[0], S, D) and, of two numbers of heads, k."""
    x_strides = [step for each in (strides[0], strides[-1]) for step in each]
    row_unit = unit(gcd(half, dim, *x_strides, *angle_strides))
    in_units = [size // row_unit for size in (dim, half, *x_strides, *angle_strides)]
    sizes = (length, heads[0], heads[-1], *in_units)
    rest = dim - 2 * half
    setting = rotary_tile(narrowest)
    cols = min(power_of_two(max(half, ceil_div(rest, 2))), setting.block)
    rows = setting.block // cols
    positions = min(max(rows // ROTARY_HEADS, 1), power_of_two(length))
    group = min(rows // positions, power_of_two(max(heads)))
    tiles = ceil_div(half, cols) + ceil_div(rest, 2 * cols)
    groups = sum(ceil_div(count, group) for count in heads)
    constants = {
        "FORWARD": forward, "INTERLEAVED": interleaved, "SEQ_INNER": seq_dim == -2, "UNIT": row_unit,
        "HEADS": group, "POSITIONS": positions, "COLS": cols,
    }  # fmt: skip
    programs = tiles * groups * ceil_div(length, positions) * batch
    warps = max(1, setting.warps * group * positions * cols // setting.block)  # fewer for a small tile
    return Launch(_rotate, (programs,), sizes, constants, warps)


# ------------------------------------------------------------------------------------------------------------- kernel
# Triton does not specialise on any integer here: UNIT gives the compiler the alignment.


@profiled(
    do_not_specialize=[
        "length", "q_heads", "k_heads", "dim", "half", "q_batch", "q_head", "q_position", "k_batch", "k_head",
        "k_position", "angle_batch", "angle_position",
    ]
)  # fmt: skip
def _rotate(
    q_out_ptr, k_out_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr,
    length, q_heads, k_heads, dim, half, q_batch, q_head, q_position, k_batch, k_head, k_position,
    angle_batch, angle_position,
    FORWARD: tl.constexpr, INTERLEAVED: tl.constexpr, SEQ_INNER: tl.constexpr, UNIT: tl.constexpr,
    HEADS: tl.constexpr, POSITIONS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Rotate COLS pairs of POSITIONS positions of HEADS heads of q or of k, or copy 2 * COLS columns after the pairs.

    Grid (tiles of columns * groups of heads * cdiv(S, POSITIONS) * B,). ``dim``, ``half`` and all strides are in units
    of UNIT. q_out_ptr, k_out_ptr: (B, N, S, D) if SEQ_INNER, else (B, S, N, D), contiguous. k_ptr may be None.
    cos_ptr, sin_ptr: (1 or B, S, R/2), strides (angle_batch, angle_position, 1).
    """
    tiles = (half.to(tl.int64) * UNIT + COLS - 1) // COLS
    all_tiles = tiles + ((dim - 2 * half).to(tl.int64) * UNIT + 2 * COLS - 1) // (2 * COLS)
    q_groups = (q_heads.to(tl.int64) + HEADS - 1) // HEADS
    groups = q_groups
    if k_ptr is not None:
        groups += (k_heads.to(tl.int64) + HEADS - 1) // HEADS
    tile, program = _split(tl.program_id(0).to(tl.uint32), all_tiles)
    group, program = _split(program, groups)
    position_tile, batch = _split(program, (length.to(tl.int64) + POSITIONS - 1) // POSITIONS)
    tile, group, batch = tile.to(tl.int64), group.to(tl.int64), batch.to(tl.int64)
    rows = tl.arange(0, HEADS * POSITIONS)
    position = position_tile.to(tl.int64) * POSITIONS + rows % POSITIONS
    angle = (batch * angle_batch + position * angle_position) * UNIT
    if group < q_groups:
        head = group * HEADS + rows // POSITIONS
        _of_one(
            q_out_ptr, q_ptr, cos_ptr, sin_ptr, batch, head, position, angle, tile, tiles,
            q_heads, length, dim, half, q_batch, q_head, q_position,
            FORWARD, INTERLEAVED, SEQ_INNER, UNIT, COLS,
        )  # fmt: skip
    elif k_ptr is not None:
        head = (group - q_groups) * HEADS + rows // POSITIONS
        _of_one(
            k_out_ptr, k_ptr, cos_ptr, sin_ptr, batch, head, position, angle, tile, tiles,
            k_heads, length, dim, half, k_batch, k_head, k_position,
            FORWARD, INTERLEAVED, SEQ_INNER, UNIT, COLS,
        )  # fmt: skip


@triton.jit
def _split(program, count):
    """Return ``program % count`` and ``program // count``, 32-bit: a grid has fewer programs than 2**31."""
    count = count.to(tl.uint32)
    return program % count, program // count


@triton.jit
def _of_one(
    y_ptr, x_ptr, cos_ptr, sin_ptr, batch, head, position, angle, tile, tiles,
    heads, length, dim, half, batch_stride, head_stride, position_stride,
    FORWARD: tl.constexpr, INTERLEAVED: tl.constexpr, SEQ_INNER: tl.constexpr, UNIT: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write one tile of rows and columns. ``head``, ``position`` and ``angle`` are of each row, 64-bit."""
    inside = ((head < heads) & (position < length))[:, None]
    x_row = (batch * batch_stride + head * head_stride + position * position_stride) * UNIT
    row = (batch * heads + head) * length + position if SEQ_INNER else (batch * length + position) * heads + head
    width = dim.to(tl.int64) * UNIT
    y_row, columns = row * width, half.to(tl.int64) * UNIT
    if tile < tiles:
        cos_at = angle[:, None] + (tile * COLS + tl.arange(0, COLS))[None, :]
        _turn(
            y_ptr, x_ptr, cos_ptr + cos_at, sin_ptr + cos_at, y_row, x_row, inside, columns, tile,
            FORWARD, INTERLEAVED, COLS,
        )  # fmt: skip
    else:
        _copy(
            y_ptr + y_row[:, None], x_ptr + x_row[:, None], inside, width, 2 * columns + (tile - tiles) * 2 * COLS, COLS
        )


@triton.jit
def _turn(
    y_ptr, x_ptr, cos_at, sin_at, y_row, x_row, inside, columns, tile,
    FORWARD: tl.constexpr, INTERLEAVED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs of one tile. ``cos_at`` and ``sin_at`` are the addresses of their angles."""
    col = tile * COLS + tl.arange(0, COLS)
    kept = inside & (col < columns)[None, :]
    cos = read(cos_at, kept)
    sin = read(sin_at, kept)
    if not FORWARD:
        sin = -sin
    if INTERLEAVED:
        both = tile * (2 * COLS) + tl.arange(0, 2 * COLS)
        each = inside & (both < 2 * columns)[None, :]
        x = read(x_ptr + x_row[:, None] + both[None, :], each)
        first, second = tl.split(tl.reshape(x, [x_row.shape[0], COLS, 2]))
        y = tl.join(first * cos - second * sin, second * cos + first * sin)
        y = tl.reshape(y, [x_row.shape[0], 2 * COLS])
        tl.store(y_ptr + y_row[:, None] + both[None, :], rounded(y, y_ptr), mask=each)
    else:
        first = read(x_ptr + x_row[:, None] + col[None, :], kept)
        second = read(x_ptr + x_row[:, None] + (col + columns)[None, :], kept)
        one, two = first * cos - second * sin, second * cos + first * sin
        tl.store(y_ptr + y_row[:, None] + col[None, :], rounded(one, y_ptr), mask=kept)
        tl.store(y_ptr + y_row[:, None] + (col + columns)[None, :], rounded(two, y_ptr), mask=kept)


@triton.jit
def _copy(y_rows, x_rows, inside, width, start, COLS: tl.constexpr):
    """Copy 2 * COLS columns from ``start`` on, which do not rotate. ``y_rows`` and ``x_rows`` are where rows begin."""
    col = start + tl.arange(0, 2 * COLS)
    kept = inside & (col < width)[None, :]
    tl.store(y_rows + col[None, :], tl.load(x_rows + col[None, :], mask=kept), mask=kept)

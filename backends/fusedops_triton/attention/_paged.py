"""Attention to keys in pages in Triton: their codes are read once for all query heads that share a key head.

A program has some rows of a sequence, which are its queries times the query heads of one key head, and goes through the
keys in parts of 512. Where there are few programs, as for a token of each sequence, each part is a program of its own,
and a second kernel joins them. Both join the parts in their order by the same arithmetic, so a row has the same bits
either way. No kernel waits for the device: the programs find their sequence by the bounds.

Codes are exact in bfloat16 and float16, in which tensor cores multiply them. A probability times the scale of a value
is rounded to bfloat16, for float16 to the sum of two of them. float8 is read by its bits: a conversion needs sm_89.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from fusedops.ops.attention.arguments import PagedAttentionArgs, pages_of, sequences_of
from fusedops_triton._jit._bias import rounded
from fusedops_triton._jit._common import TYPES, exp, read, scalar, widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch import settings
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div, power_of_two
from fusedops_triton.norms._norm import ready
from fusedops_triton.quantized._scaled import e4m3

# None of these settings was measured on a GPU. They do not depend on the number of queries, and so neither do the bits.
_WARPS = 8
#: Keys of a part, and the most elements that the parts of all rows may have: 256 MiB.
_PART, _MOST_IN_PARTS = 512, 2**26
_CAUSAL = {"none": 0, "upper_left": 1, "lower_right": 2}
_NO_LIMIT = 2**40


def paged_attention(a: PagedAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute out and lse; tensors of any strides."""
    q, k, v = (rows_of(each) for each in (a.q, a.k, a.v))
    tokens, heads, size = q.shape
    pages, page, key_heads, value_size = v.shape
    if q.is_cpu:  # in the interpreter: raises for what is not valid
        sequences_of(a.cu_seqlens_q, None, tokens, tokens)
        pages_of(a.block_table, a.seqused_k, pages, page)
    out, lse = q.new_zeros(tokens, heads, value_size), q.new_full((tokens, heads), -math.inf, dtype=torch.float32)
    sequences, columns = a.block_table.shape
    if not lse.numel() or not pages * page * sequences * columns:
        return out, lse
    bounds = a.cu_seqlens_q.resolve_neg().clamp(0, tokens).cummax(0).values
    scales = [
        None if each is None else each.resolve_neg().float().expand(pages, page, key_heads, 1)
        for each in (a.k_scale, a.v_scale)
    ]
    strides = (
        *(*q.stride()[:2], *k.stride()[:3], *v.stride()[:3]),
        *(step for each in scales for step in ((0, 0, 0) if each is None else each.stride()[:3])),
    )
    sizes = (tokens, heads, size, pages, page, key_heads, value_size, sequences, columns)
    window = None if a.window is None else (a.window[0], a.window[1])
    attend, join = _launches(sizes, strides, q.dtype, k.dtype, a.causal, window)
    tensors = (bounds, ready(a.block_table), ready(a.seqused_k), *scales)
    caches = (each.view(torch.uint8) if each.dtype is torch.float8_e4m3fn else each for each in (k, v))
    factor = float(max(size, 1) ** -0.5 if a.scale is None else a.scale)
    if join is None:
        attend(q, out, lse, None, q, *caches, *tensors, factor)
    else:
        parts = attend.grid[2]
        of_parts = out.new_empty((tokens, heads, parts, value_size), dtype=torch.float32)
        largest, sums = (lse.new_full((tokens, heads, parts), each) for each in (-math.inf, 0.0))
        attend(q, of_parts, largest, sums, q, *caches, *tensors, factor)
        join(q, out, lse, of_parts, largest, sums)
    return out, lse


def rows_of(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where the elements of its last dim do not lie one after another."""
    tensor = tensor.resolve_neg()
    return tensor if tensor.shape[-1] < 2 or tensor.stride(-1) == 1 else tensor.contiguous()


def _tile(size: int, wide: bool, nvidia: bool) -> tuple[int, int]:
    """Return the rows and keys of a tile: the most whose sums and scores fit in the registers of 8 warps."""
    if wide:
        return 16, 32
    return (64 if size <= 128 else 32), (32 if nvidia else 16)


@cached_by_layout
def _launches(
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    of_cache: torch.dtype,
    causal: str,
    window: tuple[int, int] | None,
) -> tuple[Launch, Launch | None]:
    """Return the launch of a call, and of the join where a program has one part of its rows."""
    tokens, heads, size, pages, page, key_heads, value_size, sequences, columns = sizes
    wide, group = dtype is torch.float32, heads // key_heads
    rows, keys = _tile(max(size, value_size), wide, settings.chip.nvidia)
    tiles = tokens * group // rows + sequences
    parts = ceil_div(columns * page, _PART)
    is_split = 1 < parts < 2**15 and parts * tokens * heads * value_size <= _MOST_IN_PARTS
    is_split = is_split and tiles * key_heads < settings.chip.fills
    left, right = (0, 0) if window is None else (min(each, _NO_LIMIT) for each in window)
    is_compiled = isinstance(_attend, JITFunction)
    # times a scale, a probability may be too small for a float16
    of_codes = not wide and of_cache is not dtype
    weight = torch.bfloat16 if of_codes else dtype
    constants = {
        "CAUSAL": _CAUSAL[causal], "WINDOW": window is not None, "SPLIT": is_split, "PART": _PART,
        "IS_E4M3": of_cache is torch.float8_e4m3fn,
        # the interpreter has no products of bfloat16; those of float32 are the same
        "OF": TYPES[dtype if is_compiled else torch.float32], "WEIGHT": TYPES[weight],
        "OF_VALUES": TYPES[weight if is_compiled else torch.float32], "TWO": of_codes and dtype is torch.float16,
        "BM": rows, "BN": keys, "BD": max(power_of_two(max(size, 1)), 16), "BV": max(power_of_two(value_size), 16),
    }  # fmt: skip
    steps = max(sequences - 1, 1).bit_length()
    numbers = (steps, sequences, columns, pages, page, heads, group, size, value_size, left, right)
    grid = (tiles, key_heads, parts if is_split else 1)
    attend = Launch(_attend, grid, (*numbers, *strides), constants, _WARPS, fuses=False)
    if not is_split:
        return attend, None
    return attend, Launch(_join, (tokens * heads,), (parts, value_size), {"BV": constants["BV"]}, 1, fuses=False)


# ------------------------------------------------------------------------------------------------------ jit functions

_INF = tl.constexpr(float("inf"))


@triton.jit
def _codes(pointers, inside, OF: tl.constexpr, IS_E4M3: tl.constexpr):
    """Load numbers of a cache as numbers of products; 0 where ``inside`` is False."""
    loaded = tl.load(pointers, inside, 0)
    if IS_E4M3:
        return e4m3(loaded.to(tl.int32)).to(OF)
    return widened(loaded).to(OF)


@triton.jit
def _joined(largest, total, out, of_part, sum_of_part, out_of_part):
    """Return the largest score, the sum and the weighted values of some keys and of those of a part together."""
    most = tl.maximum(largest, of_part)
    base = tl.where(most == -_INF, 0.0, most)
    before, added = exp(largest - base), exp(of_part - base)
    total = total * before + sum_of_part * added
    return most, total, out * before[:, None] + out_of_part * added[:, None]


@triton.jit
def _results(largest, total, out):
    """Return out and lse of rows: 0 and -inf without keys."""
    has_keys = total != 0
    out = tl.where(has_keys[:, None], out / tl.where(has_keys, total, 1.0)[:, None], 0.0)
    return out, tl.where(has_keys, largest + tl.log(total), -_INF)


@profiled(do_not_specialize=["steps", "sequences", "columns", "pages", "page", "left", "right"])
def _attend(
    out_ptr, largest_ptr, sum_ptr, q_ptr, k_ptr, v_ptr, bounds_ptr, table_ptr, used_ptr, k_scale_ptr, v_scale_ptr,
    scale, steps, sequences, columns, pages, page, heads, group, size, value_size, left, right,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head,
    ks_page, ks_token, ks_head, vs_page, vs_token, vs_head,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, PART: tl.constexpr, IS_E4M3: tl.constexpr,
    OF: tl.constexpr, WEIGHT: tl.constexpr, OF_VALUES: tl.constexpr, TWO: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Compute BM rows of a sequence and a key head. Grid (tokens * group // BM + sequences, key heads, parts or 1).

    q_ptr: (tokens, heads, size). k_ptr, v_ptr: (pages, page, key heads, size or value_size); of float8, their bytes.
    bounds_ptr: (sequences + 1,), none below the one before. table_ptr: (sequences, columns). used_ptr: (sequences,).
    k_scale_ptr, v_scale_ptr: (pages, page, key heads), or None. out_ptr: (tokens, heads, value_size), and largest_ptr
    is lse, (tokens, heads). SPLIT: weighted values (tokens, heads, parts, value_size), and with sum_ptr the largest
    score and the sum of a part, (tokens, heads, parts).
    """
    tile, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    # sequence n has the tiles from bounds[n] * group // BM + n on: the last one that begins at this tile or before
    low, high = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64) + sequences
    for _ in range(steps):
        middle = (low + high) // 2
        begins = tl.load(bounds_ptr + middle).to(tl.int64) * group // BM + middle <= tile
        low, high = tl.where(begins, middle, low), tl.where(begins, high, middle)
    first_token = tl.load(bounds_ptr + low).to(tl.int64)
    queries = tl.load(bounds_ptr + low + 1).to(tl.int64) - first_token
    first = (tile - first_token * group // BM - low) * BM
    if (first < 0) | (first >= queries * group):
        return
    row = first + tl.arange(0, BM)
    exists = row < queries * group
    number = row // group
    token, head = first_token + number, key_head * group + row % group
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    q_at = (token * q_token + head * q_head)[:, None] + column[None, :]
    q = tl.load(q_ptr + q_at, exists[:, None] & (column < size)[None, :], 0.0).to(OF)
    used = tl.minimum(tl.maximum(tl.load(used_ptr + low).to(tl.int64), 0), columns.to(tl.int64) * page)
    # the keys that a row, and any row, may see: [least, most)
    moved = 0 if CAUSAL == 1 else used - queries
    least, most = tl.zeros_like(row), tl.zeros_like(row) + used
    begin, end = tl.full([], 0, tl.int64), used
    last_number = tl.minimum((first + BM - 1) // group, queries - 1)
    if WINDOW:
        least = tl.maximum(number + (moved - left), 0)
        begin = tl.maximum(first // group + (moved - left), 0)
        if CAUSAL == 0:
            most = tl.minimum(number + (moved + right + 1), used)
            end = tl.minimum(last_number + (moved + right + 1), used)
    if CAUSAL != 0:
        most = tl.minimum(number + (moved + 1), used)
        end = tl.minimum(last_number + (moved + 1), used)
    first_part, last_part = begin // PART, (end + PART - 1) // PART
    if SPLIT:
        first_part = tl.maximum(first_part, tl.program_id(2))
        last_part = tl.minimum(last_part, tl.program_id(2) + 1)
    scale = scalar(scale)
    all_largest, all_sum = tl.full([BM], -_INF, tl.float32), tl.zeros([BM], tl.float32)
    all_out = tl.zeros([BM, BV], tl.float32)
    table_ptr += low * columns
    for part in range(first_part, last_part):
        largest, total = tl.full([BM], -_INF, tl.float32), tl.zeros([BM], tl.float32)
        out = tl.zeros([BM, BV], tl.float32)
        for start in range(tl.maximum(part * PART, begin // BN * BN), tl.minimum(part * PART + PART, end), BN):
            key = tl.arange(0, BN)
            inside = (key >= begin - start) & (key < end - start)
            place = (start % page).to(tl.int32) + key
            at = tl.load(table_ptr + (start // page + place // page), inside, 0).to(tl.int64)
            at, token_at = tl.minimum(tl.maximum(at, 0), pages - 1), (place % page).to(tl.int64)
            k_at = (at * k_page + token_at * k_token + key_head * k_head)[:, None] + column[None, :]
            k = _codes(k_ptr + k_at, inside[:, None] & (column < size)[None, :], OF, IS_E4M3)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=tl.float32) * scale
            if k_scale_ptr is not None:
                scales = read(k_scale_ptr + at * ks_page + token_at * ks_token + key_head * ks_head, inside)
                scores = scores * scales[None, :]
            begins_at = tl.minimum(tl.maximum(least - start, 0), BN).to(tl.int32)
            ends_at = tl.minimum(tl.maximum(most - start, 0), BN).to(tl.int32)
            seen = (key[None, :] >= begins_at[:, None]) & (key[None, :] < ends_at[:, None])
            scores = tl.where(seen, scores, -_INF)
            now = tl.maximum(largest, tl.max(scores, 1))
            base = tl.where(now == -_INF, 0.0, now)
            before = exp(largest - base)
            weights = exp(scores - base[:, None])
            total, largest = total * before + tl.sum(weights, 1), now
            v_at = (at * v_page + token_at * v_token + key_head * v_head)[:, None] + value_column[None, :]
            v = _codes(v_ptr + v_at, inside[:, None] & (value_column < value_size)[None, :], OF_VALUES, IS_E4M3)
            if v_scale_ptr is not None:
                scales = read(v_scale_ptr + at * vs_page + token_at * vs_token + key_head * vs_head, inside)
                weights = weights * scales[None, :]
            high_part = weights.to(WEIGHT)
            added = tl.dot(high_part.to(OF_VALUES), v, input_precision="ieee", out_dtype=tl.float32)
            if TWO:
                # the rest of each weight, larger by 2**8: what is scaled is no sum of products
                rest = ((weights - high_part.to(tl.float32)) * 256.0).to(WEIGHT).to(OF_VALUES)
                added += tl.dot(rest, v, input_precision="ieee", out_dtype=tl.float32) * 0.00390625
            out = out * before[:, None] + added
        if SPLIT:
            all_largest, all_sum, all_out = largest, total, out
        else:
            all_largest, all_sum, all_out = _joined(all_largest, all_sum, all_out, largest, total, out)
    place = token * heads + head
    if SPLIT:
        place = place * tl.num_programs(2) + tl.program_id(2)
        if first_part < last_part:
            tl.store(largest_ptr + place, all_largest, exists)
            tl.store(sum_ptr + place, all_sum, exists)
            out_at = place[:, None] * value_size + value_column[None, :]
            tl.store(out_ptr + out_at, all_out, exists[:, None] & (value_column < value_size)[None, :])
    else:
        result, lse = _results(all_largest, all_sum, all_out)
        out_at = place[:, None] * value_size + value_column[None, :]
        tl.store(out_ptr + out_at, rounded(result, out_ptr), exists[:, None] & (value_column < value_size)[None, :])
        tl.store(largest_ptr + place, lse, exists)


@profiled(do_not_specialize=["parts"])
def _join(out_ptr, lse_ptr, part_ptr, largest_ptr, sum_ptr, parts, value_size, BV: tl.constexpr):
    """Join the parts of a row. Grid (rows,). Tensors as of _attend with SPLIT; parts without keys are not read."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BV)
    one = tl.arange(0, 1)
    largest, total = tl.full([1], -_INF, tl.float32), tl.zeros([1], tl.float32)
    out = tl.zeros([1, BV], tl.float32)
    for part in range(parts):
        place = row * parts + part + one
        of_part, sum_of_part = tl.load(largest_ptr + place), tl.load(sum_ptr + place)
        there = (sum_of_part != 0)[:, None] & (column < value_size)[None, :]
        out_of_part = tl.load(part_ptr + place[:, None] * value_size + column[None, :], there, 0.0)
        largest, total, out = _joined(largest, total, out, of_part, sum_of_part, out_of_part)
    result, lse = _results(largest, total, out)
    at = row * value_size + column[None, :]
    tl.store(out_ptr + at, rounded(result, out_ptr), (column < value_size)[None, :])
    tl.store(lse_ptr + row + one, lse)

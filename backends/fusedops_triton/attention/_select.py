"""The choice of keys by the scores of an indexer, in Triton: the scores of some queries at a time.

    scores    A program computes the scores of some queries and some keys: their products, for all heads at once, and
              the sum over heads. It stores them as integers of the same order, of which 0 stands for a key that is
              hidden and the largest one for NaN. Those of keys above the diagonal are neither computed nor read.
    select    A program finds the last score of a row that is chosen by its digits of 8 bits, from the highest on, each
              by a histogram of the scores that begin as it does. One more pass writes the indices, each to the place
              that is the number of those chosen before it.

At most ``_SCORES`` scores exist at a time, of at least one block of queries. Nothing is sorted, and no order of atomics
decides a result. A choice depends on its query and keys alone.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from fusedops import masks
from fusedops.ops.attention.arguments import SelectKeysArgs
from fusedops_triton._jit._bias import unit
from fusedops_triton._jit._common import TYPES, scalar
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.experts._grouped import Tiles
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div, power_of_two
from fusedops_triton.linear_attention._linear_attention_parts import precision_of

_SCORES = 2**24  # 64 MB
_BLOCK = 2048  # scores of a row at a time: so many counts fit in half of the 32 bits of a sum
#: Rows, which are heads of queries, keys and columns at a time, by element size. Twice the keys, or columns of float32,
#: spill 16 to 32 bytes of a thread on sm_80 or sm_100.
_TILES = {2: Tiles(128, 64, 64, 8), 4: Tiles(64, 64, 16, 8)}
_ANY = 2**31 - 1  # above the difference of any two positions


class _Layout(NamedTuple):
    """The layout of a launch.

    Attributes:
        sizes: B, S, H, T, D.
        steps: the strides of k (batch, key).
        mask: the strides of the mask (batch, query, key).
        dtype: of q and k.
    """

    sizes: tuple[int, int, int, int, int]
    steps: tuple[int, int]
    mask: tuple[int, ...]
    dtype: torch.dtype


# ---------------------------------------------------------------------------------------------------------- launchers


def select_keys(a: SelectKeysArgs) -> Tensor:
    """Compute the op; any strides."""
    (batch, queries, heads, size), keys = a.q.shape, a.k.shape[1]
    index = torch.empty((batch, queries, a.count), dtype=torch.int32, device=a.q.device)
    if not index.numel() or not keys:
        return index.fill_(-1)
    q, weights, k = a.q.resolve_neg().contiguous(), a.weights.resolve_neg().contiguous(), a.k.resolve_neg()
    k = k if k.stride(-1) == 1 else k.contiguous()
    mask = None if a.mask is None else a.mask.view(torch.uint8).expand(batch, queries, keys)
    _, high = masks.band(queries, keys, a.causal, None)
    block = _queries_of(a.q.dtype, heads)
    rows = min(queries, max(block, _SCORES // keys // block * block))
    several = min(batch, max(1, _SCORES // (keys * rows))) if rows == queries else 1
    scores = index.new_empty((several * rows, keys))
    for b in range(0, batch, several):
        for i in range(0, queries, rows):
            at = slice(b, b + several), slice(i, i + rows)
            part, own = q[at], None if mask is None else mask[at]
            steps = tuple(step if n > 1 else 0 for step, n in zip(k.stride(), k.shape[:2]))
            of_mask = (0, 0, 0) if own is None else own.stride()
            layout = _Layout((*part.shape[:3], keys, size), steps, of_mask, q.dtype)
            reach = _ANY if high is None else high + i  # of the part's first query
            rank, select = _launches(layout, a.count)
            rank(q, scores, part, k[at[0]], weights[at], own, float(a.scale), reach)
            select(q, index[at], scores, reach)
    return index


def _queries_of(dtype: torch.dtype, heads: int) -> int:
    """Return the queries of a program."""
    rows = _TILES[dtype.itemsize].m
    return rows // min(power_of_two(max(heads, 1)), rows)


@cached_by_layout
def _launches(layout: _Layout, count: int) -> tuple[Launch, Launch]:
    batch, queries, heads, keys, size = layout.sizes
    tiles = _TILES[layout.dtype.itemsize]
    at_once = _queries_of(layout.dtype, heads)
    by = unit(gcd(size, *layout.steps) or 16)
    across, down = ceil_div(keys, tiles.n), ceil_div(queries, at_once)
    constants = {
        "BQ": at_once, "BH": tiles.m // at_once, "BN": tiles.n, "BK": tiles.k, "UNIT": by,
        "OF": TYPES[layout.dtype if isinstance(_rank, JITFunction) else torch.float32],
        "PRECISION": precision_of(_rank),
    }  # fmt: skip
    sizes = (queries, heads, keys, size // by, *(step // by for step in layout.steps), *layout.mask, across, down)
    rank = Launch(_rank, (batch * down * across,), sizes, constants, tiles.warps)
    block = max(256, min(_BLOCK, power_of_two(keys)))
    select = Launch(_select, (batch * queries,), (queries, keys, count), {"BLOCK": block}, block // 256)
    return rank, select


# ------------------------------------------------------------------------------------------------------ jit functions


@profiled(do_not_specialize=[
    "reach", "queries", "heads", "keys", "size", "k_batch", "k_row", "m_batch", "m_query", "m_key", "across", "down",
])  # fmt: skip
def _rank(
    rank_ptr, q_ptr, k_ptr, weight_ptr, mask_ptr, scale, reach, queries, heads, keys, size, k_batch, k_row,
    m_batch, m_query, m_key, across, down,
    BQ: tl.constexpr, BH: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, UNIT: tl.constexpr, OF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the scores of BQ queries and BN keys, BH heads at a time. Grid (B * down * across,).

    rank_ptr: (B, queries, keys), uint32 in int32. q_ptr: (B, queries, heads, D), contiguous; D = size * UNIT.
    weight_ptr: (B, queries, heads), contiguous. reach: the last key that the first query sees.
    """
    program = tl.program_id(0)
    block, rest = program % across, program // across
    batch = (rest // down).to(tl.int64)
    first_query = (rest % down) * BQ
    if block.to(tl.int64) * BN <= first_query.to(tl.int64) + BQ - 1 + reach:
        size = size * UNIT
        key = block * BN + tl.arange(0, BN)
        k_ptr += batch * k_batch * UNIT
        k_at = (key.to(tl.int64) * k_row * UNIT)[:, None]
        number = tl.arange(0, BQ * BH)
        row = batch * queries + first_query + number // BH
        there = first_query + number // BH < queries
        scores = tl.zeros((BQ, BN), tl.float32)
        for first_head in range(0, heads, BH):
            head = first_head + number % BH
            known = there & (head < heads)
            rows = row * heads + head
            total = tl.zeros((BQ * BH, BN), tl.float32)
            for first in range(0, size, BK):
                at = first + tl.arange(0, BK)
                fits = (at < size)[None, :]
                q = tl.load(q_ptr + (rows * size)[:, None] + at[None, :], known[:, None] & fits, 0.0).to(OF)
                k = tl.load(k_ptr + k_at + at[None, :], (key < keys)[:, None] & fits, 0.0).to(OF)
                total = tl.dot(q, tl.trans(k), total, input_precision=PRECISION, out_dtype=tl.float32)
            total *= scalar(scale)
            weight = tl.load(weight_ptr + rows, known, 0.0).to(tl.float32)
            total = tl.where(total < 0, 0.0, total) * weight[:, None]  # NaN stays
            total = tl.where(known[:, None], total, 0.0)
            scores += tl.sum(tl.reshape(total, (BQ, BH, BN)), 1)
        query = first_query + tl.arange(0, BQ)
        inside = (query < queries)[:, None] & (key < keys)[None, :]
        seen = inside & (key.to(tl.int64)[None, :] <= query.to(tl.int64)[:, None] + reach)
        if mask_ptr is not None:
            at = (batch * m_batch + query.to(tl.int64) * m_query)[:, None] + (key.to(tl.int64) * m_key)[None, :]
            seen = seen & (tl.load(mask_ptr + at, seen, 1) == 0)
        bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 is 0
        rank = bits ^ ((bits >> 31) | -0x80000000)
        rank = tl.where(scores == scores, rank, -1)
        to = ((batch * queries + query) * keys)[:, None] + key[None, :]
        tl.store(rank_ptr + to, tl.where(seen, rank, 0), inside)


@triton.jit
def _loaded(rank_ptr, at, end):
    return tl.load(rank_ptr + at, at < end, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _with_digit(rank_ptr, end, limit, left, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the last score that is chosen with its digit at SHIFT, and how many are left to choose from it on."""
    counts = tl.zeros([256], tl.int32)
    for first in range(0, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        rank = _loaded(rank_ptr, at, end)
        begins = (at < end) & (((rank ^ limit) >> SHIFT) < 256)
        counts += tl.histogram(((rank >> SHIFT) & 255).to(tl.int32), 256, begins)
    from_digit = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    digit = tl.sum((from_digit >= left).to(tl.int32), 0) - 1
    left -= tl.sum(tl.where(tl.arange(0, 256) > digit, counts, 0), 0)
    return limit | (digit.to(tl.uint32) << SHIFT), left


@profiled(do_not_specialize=["reach", "queries", "keys", "count"])
def _select(index_ptr, rank_ptr, reach, queries, keys, count, BLOCK: tl.constexpr):
    """Choose the keys of a row. Grid (rows,). index_ptr: (rows, count). rank_ptr: (rows, keys), as of ``_rank``."""
    row = tl.program_id(0).to(tl.int64)
    rank_ptr += row * keys
    index_ptr += row * count
    end = tl.minimum(tl.maximum(row % queries + reach + 1, 0), keys).to(tl.int32)  # what is behind was not written
    limit, left = tl.full([], 0, tl.uint32), tl.full([], 0, tl.int32)
    if end > count:
        left += count
        for turn in tl.static_range(4):
            limit, left = _with_digit(rank_ptr, end, limit, left, 24 - 8 * turn, BLOCK)
        left = tl.where(limit == 0, 0, left)  # hidden keys
    # of those that are as large as the last one, as many as are left
    above, equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for first in range(0, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        rank = _loaded(rank_ptr, at, end)
        is_above, is_equal = (rank > limit).to(tl.int32), ((rank == limit) & (at < end)).to(tl.int32)
        pairs = is_above + (is_equal << 16)
        before = tl.cumsum(pairs, 0) - pairs
        above_before, equal_before = above + (before & 0xFFFF), equal + (before >> 16)
        place = above_before + tl.minimum(equal_before, left)
        chosen = (is_above != 0) | ((is_equal != 0) & (equal_before < left))
        tl.store(index_ptr + place, at, chosen)
        above += tl.sum(is_above, 0)
        equal += tl.sum(is_equal, 0)
    for first in range(above + tl.minimum(equal, left), count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(index_ptr + at, tl.full([BLOCK], -1, tl.int32), at < count)

"""Linear attention in Triton, backward: the gradients of q, k, decay and beta, chunk by chunk.

    scores          A program has a chunk and a value head. It computes the gradients of the weighted products of
                    queries and keys and, for the delta rule, of keys and keys, and that of beta.
    chunks          A program has a chunk, a value head and some rows of the states. It adds up the gradients of its
                    columns of q and k, and of its part of the decays.
    key heads       A program adds up the gradients of the value heads of a key head, and has those of the
                    normalization.

What is added up has a fixed order. There are no atomics.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fusedops_triton._jit._bias import rounded
from fusedops_triton._jit._common import read, scalar
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch import settings
from fusedops_triton.launch.chips import CHIPS
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div, power_of_two
from fusedops_triton.linear_attention._linear_attention_parts import (
    CHUNK,
    FACTORS,
    Call,
    Parts,
    Sizes,
    load_matrix,
    place_of,
    product,
    rnorm_of,
    slice_of,
    types_of,
    units,
    weights_of,
)

#: Columns of the values at a time, and the warps, of a program that has the products of a chunk, for 16-bit tensors in
#: chunks of 64, and for others, with beta and without. Of 8 warps on sm_90, two groups of 4 compute the same products.
#: Not measured: chosen by the count of compiled instructions.
OF_SCORES = {"beta": (32, 4), "": (64, 4), "other beta": (16, 4), "other": (16, 4)}
#: Rows of the states, and columns of them at a time, and the warps, of a program that has a chunk, in the same order.
#: Larger ones spill on sm_90: 56 bytes with 64 and 64, which Triton before 3.9 has there (``Sizes.least_side``).
OF_CHUNK = {"beta": (32, 64, 4), "": (32, 64, 4), "other beta": (16, 32, 4), "other": (32, 32, 4)}
#: Elements of a program that adds up value heads.
SUMMED = 2048


class Walked(NamedTuple):
    """The results of the two walks.

    Attributes:
        states: before each chunk, (numbers, Hv, Dk, Dv), float32.
        values: u without beta, (B, S, Hv, Dv), float32; without the delta rule v itself.
        of_states: the gradients of the states after each chunk, as ``states``.
        of_values: those of ``beta * values``, through all later positions, (B, S, Hv, Dv), float32.
    """

    states: Tensor
    values: Tensor
    of_states: Tensor
    of_values: Tensor


# ---------------------------------------------------------------------------------------------------------- launchers


def chunk_gradients(call: Call, parts: Parts, grad_out: Tensor, walked: Walked, results: list[Tensor | None]) -> None:
    """Write the gradients of q, k, decay and beta into ``results``, where these are wanted, and over the inverse."""
    sizes, (dq, dk, _, ddecay, dbeta, _) = call.sizes, results
    # gradients take the memory of the inverse, which no other kernel reads any more
    of_pairs = None if parts.inverse is None else parts.inverse.view(torch.float32)
    of_products, of_values = (
        (torch.empty_like(parts.products).view(torch.float32), of_pairs),
        (walked.values, walked.of_values),
    )
    make = torch.empty if call.bounds is None else torch.zeros
    places, device = (*call.v.shape[:3],), call.v.device
    chunk_launch, blocks = _chunk_launch(sizes, call.beta is not None)
    of_decay = None if ddecay is None else make((1 + blocks, *places), dtype=torch.float32, device=device)
    launch = _scores_launch(sizes, call.beta is not None)
    inputs = (call.k, call.decay, call.beta, call.bounds, parts.factors)
    launch(call.v, *of_products, of_decay, dbeta, parts.products, grad_out, *of_values, *inputs)
    if dq is None and dk is None and ddecay is None:
        return
    of_queries, of_keys = (
        None if each is None else make((*places, sizes.size_k), dtype=torch.float32, device=device) for each in (dq, dk)
    )
    inputs = (call.q, call.k, call.beta, call.bounds)
    chunk_launch(call.v, of_queries, of_keys, of_decay, *of_products, grad_out, *walked, *inputs, parts.factors)
    if ddecay is not None and of_decay is not None:
        ddecay.copy_(of_decay.sum(0))
    for result, each, x, scale in ((dq, of_queries, call.q, call.scale), (dk, of_keys, call.k, 1.0)):
        if result is not None:
            _heads_launch(sizes, call.v.shape[0], call.normalize)(result, result, each, x, scale)


def _setting_of(sizes: Sizes, delta: bool) -> str:
    """Return which of the settings a call has. delta: there is a beta."""
    other = "" if sizes.split and sizes.chunk == CHUNK else "other"
    return f"{other} beta".strip() if delta else other


@cached_by_layout
def _scores_launch(sizes: Sizes, delta: bool) -> Launch:
    (size_k, size_v), by = units(sizes)
    most_cols, warps = OF_SCORES[_setting_of(sizes, delta)]
    cols = max(min(power_of_two(sizes.size_v), most_cols), sizes.least_side)
    constants = {
        **by, "STEPS": (sizes.sequences - 1).bit_length(), "C": sizes.chunk,
        "BK": slice_of(sizes), "BV": cols, **types_of(_scores_back, sizes.split),
    }  # fmt: skip
    numbers = (sizes.sequences, sizes.positions, sizes.chunks, sizes.heads, sizes.group, size_k, size_v)
    return Launch(_scores_back, (sizes.numbers * sizes.heads,), numbers, constants, warps)


@cached_by_layout
def _chunk_launch(sizes: Sizes, delta: bool) -> tuple[Launch, int]:
    """Return the launch, and the blocks of rows of the states. delta: there is a beta."""
    (size_k, size_v), by = units(sizes)
    most_rows, most_cols, warps = OF_CHUNK[_setting_of(sizes, delta)]
    if settings.chip == CHIPS["sm_80"]:  # whose tensor cores take operands from registers: 192 bytes would spill
        most_rows = 16
    rows = max(min(power_of_two(sizes.size_k), most_rows), sizes.least_side)
    cols = max(min(power_of_two(sizes.size_v), most_cols), sizes.least_side)
    blocks = ceil_div(sizes.size_k, rows)
    constants = {
        **by, "STEPS": (sizes.sequences - 1).bit_length(), "C": sizes.chunk, "BK": rows, "BV": cols,
        **types_of(_chunk_back, sizes.split),
    }  # fmt: skip
    rows_of_all = sizes.positions if sizes.packed else sizes.positions * sizes.sequences
    numbers = (
        sizes.sequences, sizes.positions, sizes.chunks, sizes.heads, sizes.group, size_k, size_v, blocks,
        rows_of_all,
    )  # fmt: skip
    return Launch(_chunk_back, (sizes.numbers * sizes.heads * blocks * 2,), numbers, constants, warps), 2 * blocks


@cached_by_layout
def _heads_launch(sizes: Sizes, batch: int, normalize: bool) -> Launch:
    (size_k, _), by = units(sizes)
    block = power_of_two(sizes.size_k)
    rows = max(SUMMED // block, 1)
    constants = {"UNIT_K": by["UNIT_K"], "NORMALIZE": normalize, "ROWS": rows, "BLOCK": block}
    n_rows = batch * sizes.positions * sizes.heads // sizes.group
    return Launch(_sum_heads, (ceil_div(n_rows, rows),), (n_rows, sizes.group, size_k), constants, 4)


# ------------------------------------------------------------------------------------------------------ jit functions
# size_k and size_v are over UNIT_K and UNIT_V, as in ``_linear_attention.py``.


@profiled(do_not_specialize=["count", "positions", "chunks", "heads", "group", "size_k", "size_v"])
def _scores_back(
    of_scores_ptr, of_pairs_ptr, of_decay_ptr, dbeta_ptr, products_ptr, grad_ptr, values_ptr, of_values_ptr, k_ptr,
    decay_ptr, beta_ptr, bounds_ptr, factors_ptr, count, positions, chunks, heads, group, size_k, size_v,
    UNIT_K: tl.constexpr, UNIT_V: tl.constexpr, STEPS: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, SPLIT: tl.constexpr, OF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the products of one chunk and value head, and of beta. Grid (numbers * Hv,).

    of_scores_ptr: for the gradients of the products of queries (rows) and keys, (numbers, Hv, C, C). of_pairs_ptr: for
    the sum of the gradients of those of keys and earlier keys, and of its transpose. Both are weighted by the decays.
    of_decay_ptr: (1 + blocks, B * S, Hv), of which the first is written.
    """
    size_k, size_v = size_k * UNIT_K, size_v * UNIT_V
    line = tl.program_id(0)
    number, head = line // heads, line % heads
    base, first, end = place_of(bounds_ptr, number, count, positions, chunks, STEPS, C)
    if first < end:
        at = tl.arange(0, C)
        there, strictly = first + at < end, at[:, None] > at[None, :]
        position = base + first + at
        place = position * heads + head
        of_scores, of_pairs = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
        dbeta = tl.zeros((C,), tl.float32)
        for start in tl.range(0, size_v, BV, num_stages=1):
            col = start + tl.arange(0, BV)
            of_rows, in_rows = place[:, None] * size_v + col[None, :], there[:, None] & (col < size_v)[None, :]
            grad, u = tl.load(grad_ptr + of_rows, in_rows, 0.0), tl.load(values_ptr + of_rows, in_rows, 0.0)
            if beta_ptr is None:
                of_scores += product(grad, tl.trans(u), SPLIT, OF, PRECISION)
            else:
                beta = read(beta_ptr + place, there)[:, None]
                of_u = read(of_values_ptr + of_rows, in_rows)
                dbeta += tl.sum(of_u * u, 1)
                turned = tl.trans(beta * u)
                of_scores += product(grad, turned, SPLIT, OF, PRECISION)
                of_pairs += product(-beta * of_u, turned, SPLIT, OF, PRECISION)
        if dbeta_ptr is not None:
            tl.store(dbeta_ptr + place, rounded(dbeta, dbeta_ptr), there)
        next_there = (first + at + 1 < end) & (at + 1 < C)
        weights, _, _ = weights_of(decay_ptr, place, there, next_there, heads, C)
        square = line.to(tl.int64) * C * C + at[:, None] * C + at[None, :]
        if beta_ptr is not None:
            of_pairs = tl.where(strictly, of_pairs * weights, 0.0)
            tl.store(of_pairs_ptr + square, of_pairs + tl.trans(of_pairs))
        pairs = of_scores
        if of_decay_ptr is not None:
            pairs *= load_matrix(products_ptr, line.to(tl.int64), C, SPLIT)
        tl.store(of_scores_ptr + square, of_scores * weights)
        if of_decay_ptr is not None:
            # a pair of positions has the decays after the first one, up to the second one
            if beta_ptr is not None:
                factor = tl.load(factors_ptr + line.to(tl.int64) * FACTORS * C + C + at)
                of_line = (position * (heads // group) + head // group) * size_k
                of_keys = tl.zeros((C, C), tl.float32)
                for start in tl.range(0, size_k, BK, num_stages=1):
                    row = start + tl.arange(0, BK)
                    in_line = there[:, None] & (row < size_k)[None, :]
                    k = tl.load(k_ptr + of_line[:, None] + row[None, :], in_line, 0.0)
                    of_keys += product(k, tl.trans(k), SPLIT, OF, PRECISION)
                pairs += of_pairs * of_keys * factor[:, None] * factor[None, :]
            before = tl.where(at[:, None] >= at[None, :], tl.cumsum(pairs, 1) - pairs, 0.0)
            tl.store(of_decay_ptr + place, tl.sum(before, 0), there)


@profiled(do_not_specialize=["count", "positions", "chunks", "heads", "group", "size_k", "size_v", "blocks", "n_rows"])
def _chunk_back(
    of_queries_ptr, of_keys_ptr, of_decay_ptr, of_scores_ptr, of_pairs_ptr, grad_ptr, states_ptr, values_ptr,
    of_states_ptr, of_values_ptr, q_ptr, k_ptr, beta_ptr, bounds_ptr, factors_ptr,
    count, positions, chunks, heads, group, size_k, size_v, blocks, n_rows,
    UNIT_K: tl.constexpr, UNIT_V: tl.constexpr, STEPS: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, SPLIT: tl.constexpr, OF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BK columns of the gradient of q, or of k, of one chunk and value head. Grid (numbers * Hv * blocks * 2,).

    of_queries_ptr, of_keys_ptr: (B, S, Hv, Dk). of_decay_ptr: (1 + 2 * blocks, n_rows = B * S, Hv), of which each
    program writes one. of_scores_ptr, of_pairs_ptr: see ``_scores_back``.
    """
    size_k, size_v = size_k * UNIT_K, size_v * UNIT_V
    part, line = tl.program_id(0) % (2 * blocks), tl.program_id(0) // (2 * blocks)
    block = part // 2
    number, head = line // heads, line % heads
    base, first, end = place_of(bounds_ptr, number, count, positions, chunks, STEPS, C)
    if first < end:
        at, row = tl.arange(0, C), block * BK + tl.arange(0, BK)
        there, in_k = first + at < end, row < size_k
        position = base + first + at
        place = position * heads + head
        states = row[:, None] * size_v
        states_ptr += line.to(tl.int64) * size_k * size_v
        of_states_ptr += line.to(tl.int64) * size_k * size_v
        values = place[:, None] * size_v
        vectors = factors_ptr + line.to(tl.int64) * FACTORS * C + at
        of_line = (position * (heads // group) + head // group) * size_k
        of_line, in_line = of_line[:, None] + row[None, :], there[:, None] & in_k[None, :]
        square = at[:, None] * C + at[None, :]
        of_scores_ptr += line.to(tl.int64) * C * C

        total = tl.zeros((C, BK), tl.float32)
        if part % 2 == 0:
            for start in tl.range(0, size_v, BV, num_stages=1):
                col = start + tl.arange(0, BV)
                grad = tl.load(grad_ptr + values + col[None, :], there[:, None] & (col < size_v)[None, :], 0.0)
                state = read(states_ptr + states + col[None, :], in_k[:, None] & (col < size_v)[None, :])
                total += product(grad, tl.trans(state), SPLIT, OF, PRECISION)
            total *= tl.load(vectors + 2 * C)[:, None]
            k = tl.load(vectors + C)[:, None] * read(k_ptr + of_line, in_line)
            q = tl.load(vectors)[:, None] * read(q_ptr + of_line, in_line)
            of_decay = tl.cumsum(tl.sum(q * total, 1), 0, reverse=True)
            total += product(tl.load(of_scores_ptr + square), k, SPLIT, OF, PRECISION)
            if of_queries_ptr is not None:
                tl.store(of_queries_ptr + place[:, None] * size_k + row[None, :], total, in_line)
        else:
            whole = tl.full([], 0.0, tl.float32)
            for start in tl.range(0, size_v, BV, num_stages=1):
                col = start + tl.arange(0, BV)
                u = tl.load(values_ptr + values + col[None, :], there[:, None] & (col < size_v)[None, :], 0.0)
                if beta_ptr is not None:
                    u = read(beta_ptr + place, there)[:, None] * u
                in_state = in_k[:, None] & (col < size_v)[None, :]
                of_state = read(of_states_ptr + states + col[None, :], in_state)
                if of_decay_ptr is not None:
                    whole += tl.sum(read(states_ptr + states + col[None, :], in_state) * of_state)
                total += product(u, tl.trans(of_state), SPLIT, OF, PRECISION)
            total *= tl.load(vectors + 3 * C)[:, None]
            k = tl.load(vectors + C)[:, None] * read(k_ptr + of_line, in_line)
            earlier = tl.sum(k * total, 1)
            of_decay = tl.cumsum(earlier, 0) - earlier
            if beta_ptr is not None:
                for start in tl.range(0, size_v, BV, num_stages=1):
                    col = start + tl.arange(0, BV)
                    of_u = read(of_values_ptr + values + col[None, :], there[:, None] & (col < size_v)[None, :])
                    of_u *= -tl.load(vectors + 2 * C)[:, None] * read(beta_ptr + place, there)[:, None]
                    state = read(states_ptr + states + col[None, :], in_k[:, None] & (col < size_v)[None, :])
                    total += product(of_u, tl.trans(state), SPLIT, OF, PRECISION)
                tl.debug_barrier()  # k is read again: else the first read is held in registers through the loop
                k = tl.load(vectors + C)[:, None] * read(k_ptr + of_line, in_line)
                of_decay += tl.cumsum(tl.sum(k * total, 1) - earlier, 0, reverse=True)
                of_pairs = tl.load(of_pairs_ptr + line.to(tl.int64) * C * C + square)
                total += product(of_pairs, k, SPLIT, OF, PRECISION)
            q = tl.load(vectors)[:, None] * read(q_ptr + of_line, in_line)
            total += product(tl.trans(tl.load(of_scores_ptr + square)), q, SPLIT, OF, PRECISION)
            if of_keys_ptr is not None:
                tl.store(of_keys_ptr + place[:, None] * size_k + row[None, :], total, in_line)
            # the decays of the whole chunk: beyond the end of a sequence there are none
            of_decay += tl.load(factors_ptr + line.to(tl.int64) * FACTORS * C + 3 * C - 1) * whole
        if of_decay_ptr is not None:
            tl.store(of_decay_ptr + (1 + part).to(tl.int64) * n_rows * heads + place, of_decay, there)


@profiled(do_not_specialize=["scale", "n_rows", "group", "size_k"])
def _sum_heads(
    result_ptr, parts_ptr, x_ptr, scale, n_rows, group, size_k,
    UNIT_K: tl.constexpr, NORMALIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of ROWS rows of q or k from that of value heads. Grid (cdiv(n_rows, ROWS),).

    result_ptr, x_ptr: (n_rows, Dk). parts_ptr: (n_rows, group, Dk), of rows that are normalized and scaled.
    """
    size = size_k * UNIT_K
    row, col = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < n_rows)[:, None] & (col < size)[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for one in range(group):
        total += read(parts_ptr + (row * group + one)[:, None] * size + col[None, :], inside)
    total *= scalar(scale)
    at = row[:, None] * size + col[None, :]
    if NORMALIZE:
        x = read(x_ptr + at, inside)
        rnorm = rnorm_of(tl.sum(x * x, 1), True)[:, None]
        x *= rnorm
        of_row = (total - x * tl.sum(x * total, 1)[:, None]) * rnorm
        # a position of no sequence has 0, whatever its numbers are
        total = tl.where((tl.sum(tl.abs(total), 1) == 0.0)[:, None], 0.0, of_row)
    tl.store(result_ptr + at, rounded(total, result_ptr), inside)

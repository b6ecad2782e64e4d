"""Linear attention in Triton, backward: the state before each chunk again, then the gradients of states, then the rest.

    forward again   The walk of ``_linear_attention.py`` writes the state before each chunk and, for the delta rule,
                    what u is without beta.
    walk back       A program has some columns of the gradient of a state, in registers, and walks from the last chunk
                    to the first. It writes the gradient of the state after each chunk, and that of v.
    chunks          A program has a chunk, a value head and some rows of the states. It adds up the gradients of its
                    columns of q and k, of its part of the decays, and of beta.
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

from fusedops_triton import _settings
from fusedops_triton._bias import rounded
from fusedops_triton._chips import CHIPS
from fusedops_triton._common import read, scalar
from fusedops_triton._launch import Launch, cached_by_layout
from fusedops_triton._linear_attention import walk
from fusedops_triton._linear_attention_parts import (
    CHUNK,
    Call,
    Parts,
    Sizes,
    columns_of,
    parts_of,
    place_of,
    product,
    rnorm_of,
    stages_of,
    types_of,
    units,
    weights_of,
)
from fusedops_triton._norm import ready
from fusedops_triton._profiled import profiled
from fusedops_triton._settings import ceil_div, power_of_two

#: Rows of the states, and columns of them at a time, and the warps, of a program that has a chunk: of 64 positions with
#: beta and without, and others. Larger ones spill on sm_90. Not measured: by docs/triton-model.md, with the heads
#: of Qwen3-Next, an H200 takes 3.1 and 1.8 ms for (4, 4096) positions, with the last setting 4.3 and 3.1.
OF_CHUNK = {"beta": (16, 16, 4), "": (16, 32, 4), "other": (32, 16, 8)}
#: Elements of a program that adds up value heads.
SUMMED = 2048


class _Walked(NamedTuple):
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


def linear_attention_backward(
    call: Call, grad_out: Tensor, grad_state: Tensor | None, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k, v, decay, beta and the initial state, contiguous; None where not wanted.

    Args:
        call: the call, whose tensors have the dtypes of the gradients.
        grad_out: (B, S, Hv, Dv), the gradient of out.
        grad_state: (B or N, Hv, Dk, Dv), that of the state, or None.
        needs: the gradients to compute.
    """
    given = (call.q, call.k, call.v, call.decay, call.beta, call.state)
    make = torch.empty_like if call.bounds is None else torch.zeros_like  # positions of no sequence
    results = [make(each) if each is not None and need else None for each, need in zip(given, needs)]
    of_start, of_end = results[5], ready(grad_state)
    if call.v.numel() == 0 or call.q.numel() == 0:
        for each in results:
            if each is not None:
                each.zero_()
        if of_start is not None and of_end is not None:
            of_start.copy_(of_end)
        return tuple(results)
    parts, grad_out = parts_of(call), grad_out.resolve_neg().contiguous()
    walked = _walk_both(call, parts, grad_out, of_end, results[2], of_start)
    if any(each is not None for each in (results[0], results[1], results[3], results[4])):
        _chunk_gradients(call, parts, grad_out, walked, results)
    return tuple(results)


def _walk_both(
    call: Call, parts: Parts, grad_out: Tensor, of_end: Tensor | None, dv: Tensor | None, of_start: Tensor | None
) -> _Walked:
    """Compute the states, and the gradients that pass from chunk to chunk; write those of v and of the first states."""
    sizes, v = call.sizes, call.v
    shape = (sizes.numbers, sizes.heads, sizes.size_k, sizes.size_v)
    states = torch.empty(shape, dtype=torch.float32, device=v.device)
    values = v if call.beta is None else torch.empty(v.shape, dtype=torch.float32, device=v.device)
    walk(call, parts, None, None, states, None if call.beta is None else values)
    walked = _Walked(states, values, torch.empty_like(states), torch.empty_like(v, dtype=torch.float32))
    outputs = (dv, walked.of_values, walked.of_states, of_start)
    _back_launch(sizes)(v, *outputs, grad_out, of_end, call.q, call.k, call.beta, call.bounds, *parts)
    return walked


def _chunk_gradients(call: Call, parts: Parts, grad_out: Tensor, walked: _Walked, results: list[Tensor | None]) -> None:
    """Write the gradients of q, k, decay and beta into ``results``, where these are wanted."""
    sizes, (dq, dk, _, ddecay, dbeta, _) = call.sizes, results
    make = torch.empty if call.bounds is None else torch.zeros
    places, device = (*call.v.shape[:3],), call.v.device
    of_queries, of_keys = (
        None if each is None else make((*places, sizes.size_k), dtype=torch.float32, device=device) for each in (dq, dk)
    )
    launch, blocks = _chunk_launch(sizes, call.beta is not None)
    of_decay = None if ddecay is None else make((blocks, *places), dtype=torch.float32, device=device)
    outputs, inputs = (of_queries, of_keys, of_decay, dbeta), (call.q, call.k, call.decay, call.beta, call.bounds)
    launch(call.v, *outputs, grad_out, *walked, *inputs, parts.factors)
    if ddecay is not None and of_decay is not None:
        ddecay.copy_(of_decay.sum(0))
    for result, each, x, scale in ((dq, of_queries, call.q, call.scale), (dk, of_keys, call.k, 1.0)):
        if result is not None:
            _heads_launch(sizes, call.v.shape[0], call.normalize)(result, result, each, x, scale)


@cached_by_layout
def _back_launch(sizes: Sizes) -> Launch:
    (size_k, size_v), by = units(sizes)
    columns = columns_of(sizes, 16)
    blocks = ceil_div(sizes.size_v, columns.cols)
    constants = {**by, "C": sizes.chunk, "BK": columns.rows, "BV": columns.cols, "STAGES": stages_of(sizes)}
    constants |= types_of(_walk_back, sizes)
    numbers = (sizes.positions, sizes.chunks, sizes.heads, sizes.group, size_k, size_v, blocks)
    return Launch(_walk_back, (sizes.sequences * sizes.heads * blocks,), numbers, constants, columns.warps)


@cached_by_layout
def _chunk_launch(sizes: Sizes, delta: bool) -> tuple[Launch, int]:
    """Return the launch, and the blocks of rows of the states. delta: there is a beta."""
    (size_k, size_v), by = units(sizes)
    which = ("beta" if delta else "") if sizes.split and sizes.chunk == CHUNK else "other"
    if delta and _settings.chip == CHIPS["sm_100"]:  # it would spill 152 bytes of a thread there
        which = "other"
    most_rows, most_cols, warps = OF_CHUNK[which]
    rows = max(min(power_of_two(sizes.size_k), most_rows), 16)
    cols = max(min(power_of_two(sizes.size_v), most_cols), 16)
    blocks = ceil_div(sizes.size_k, rows)
    constants = {
        **by, "STEPS": (sizes.sequences - 1).bit_length(), "C": sizes.chunk, "BK": rows, "BV": cols,
        **types_of(_chunk_back, sizes),
    }  # fmt: skip
    rows_of_all = sizes.positions if sizes.packed else sizes.positions * sizes.sequences
    numbers = (
        sizes.sequences, sizes.positions, sizes.chunks, sizes.heads, sizes.group, size_k, size_v, blocks,
        rows_of_all,
    )  # fmt: skip
    return Launch(_chunk_back, (sizes.numbers * sizes.heads * blocks,), numbers, constants, warps), blocks


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


@profiled(do_not_specialize=["positions", "chunks", "heads", "group", "size_k", "size_v", "blocks"])
def _walk_back(
    dv_ptr, of_values_ptr, of_states_ptr, of_start_ptr, grad_ptr, of_end_ptr, q_ptr, k_ptr, beta_ptr, bounds_ptr,
    products_ptr, inverse_ptr, factors_ptr, positions, chunks, heads, group, size_k, size_v, blocks,
    UNIT_K: tl.constexpr, UNIT_V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, SPLIT: tl.constexpr, OF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk back over the chunks with BV columns of the gradient of a state. Grid (sequences * Hv * blocks,)."""
    size_k, size_v = size_k * UNIT_K, size_v * UNIT_V
    line, sequence = tl.program_id(0) // blocks, tl.program_id(0) // blocks // heads
    head = line % heads
    at, row = tl.arange(0, C), tl.arange(0, BK)
    col = (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    of_state = row[:, None] * size_v + col[None, :]
    in_k, in_v = row < size_k, col < size_v
    in_state = in_k[:, None] & in_v[None, :]
    if bounds_ptr is None:
        base, start, end = sequence.to(tl.int64) * positions, 0, positions
        number = sequence * chunks
    else:
        base, start, end = tl.full([], 0, tl.int64), tl.load(bounds_ptr + sequence), tl.load(bounds_ptr + sequence + 1)
        number = start // C + sequence
    state = tl.zeros((BK, BV), tl.float32)
    if of_end_ptr is not None:
        state = read(of_end_ptr + line.to(tl.int64) * size_k * size_v + of_state, in_state)
    own = (end - start + C - 1) // C
    for turn in tl.range(0, own, num_stages=STAGES):
        first, here = start + (own - 1 - turn) * C, (number + own - 1 - turn).to(tl.int64) * heads + head
        there = first + at < end
        position = base + first + at
        of_keys = (position * (heads // group) + head // group) * size_k
        of_keys, in_keys = of_keys[:, None] + row[None, :], there[:, None] & in_k[None, :]
        of_values = (position * heads + head) * size_v
        of_values, in_values = of_values[:, None] + col[None, :], there[:, None] & in_v[None, :]
        square = here * C * C + at[:, None] * C + at[None, :]
        vectors = factors_ptr + here * 4 * C + at
        started, keys = tl.load(vectors + 2 * C), tl.load(vectors + C)
        tl.store(of_states_ptr + here * size_k * size_v + of_state, state, in_state)
        grad = read(grad_ptr + of_values, in_values)
        k, q = tl.load(k_ptr + of_keys, in_keys, 0.0), tl.load(q_ptr + of_keys, in_keys, 0.0)
        of_u = product(tl.trans(tl.load(products_ptr + square)), grad, SPLIT, OF, PRECISION)
        of_u += (keys * tl.load(vectors + 3 * C))[:, None] * product(k, state, SPLIT, OF, PRECISION)
        passed = tl.load(factors_ptr + here * 4 * C + 3 * C - 1)
        of_out = (tl.load(vectors) * started)[:, None] * grad
        state = passed * state + product(tl.trans(q), of_out, SPLIT, OF, PRECISION)
        if beta_ptr is not None:
            beta = read(beta_ptr + position * heads + head, there)[:, None]
            of_u -= product(tl.trans(tl.load(inverse_ptr + square)), beta * of_u, SPLIT, OF, PRECISION)
            dv = beta * of_u
            state -= product(tl.trans(k), (keys * started)[:, None] * dv, SPLIT, OF, PRECISION)
        else:
            dv = of_u
        tl.store(of_values_ptr + of_values, of_u, in_values)
        if dv_ptr is not None:
            tl.store(dv_ptr + of_values, rounded(dv, dv_ptr), in_values)
    if of_start_ptr is not None:
        to = of_start_ptr + line.to(tl.int64) * size_k * size_v + of_state
        tl.store(to, rounded(state, of_start_ptr), in_state)


@profiled(do_not_specialize=["count", "positions", "chunks", "heads", "group", "size_k", "size_v", "blocks", "n_rows"])
def _chunk_back(
    of_queries_ptr, of_keys_ptr, of_decay_ptr, dbeta_ptr, grad_ptr, states_ptr, values_ptr, of_states_ptr,
    of_values_ptr, q_ptr, k_ptr, decay_ptr, beta_ptr, bounds_ptr, factors_ptr,
    count, positions, chunks, heads, group, size_k, size_v, blocks, n_rows,
    UNIT_K: tl.constexpr, UNIT_V: tl.constexpr, STEPS: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, SPLIT: tl.constexpr, OF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BK columns of the gradients of q and k of one chunk and value head. Grid (numbers * Hv * blocks,).

    of_queries_ptr, of_keys_ptr: (B, S, Hv, Dk). of_decay_ptr: (blocks, n_rows = B * S, Hv).
    """
    size_k, size_v = size_k * UNIT_K, size_v * UNIT_V
    block, line = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    number, head = line // heads, line % heads
    base, first, end = place_of(bounds_ptr, number, count, positions, chunks, STEPS, C)
    if first < end:
        at, row = tl.arange(0, C), block * BK + tl.arange(0, BK)
        there, in_k = first + at < end, row < size_k
        position = base + first + at
        place = position * heads + head
        beta = tl.full((C,), 1.0, tl.float32)
        if beta_ptr is not None:
            beta = read(beta_ptr + place, there)
        states = line.to(tl.int64) * size_k * size_v + row[:, None] * size_v
        of_scores, of_pairs = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
        of_started, of_ended = tl.zeros((C, BK), tl.float32), tl.zeros((C, BK), tl.float32)
        of_started_k = tl.zeros((C, BK), tl.float32)
        whole, dbeta = tl.zeros((BK,), tl.float32), tl.zeros((C,), tl.float32)
        for start in tl.range(0, size_v, BV, num_stages=1):
            col = start + tl.arange(0, BV)
            of_rows, in_rows = place[:, None] * size_v + col[None, :], there[:, None] & (col < size_v)[None, :]
            in_state = in_k[:, None] & (col < size_v)[None, :]
            state = read(states_ptr + states + col[None, :], in_state)
            of_state = read(of_states_ptr + states + col[None, :], in_state)
            grad, value = read(grad_ptr + of_rows, in_rows), read(values_ptr + of_rows, in_rows)
            whole += tl.sum(state * of_state, 1)
            u, turned = tl.trans(beta[:, None] * value), tl.trans(state)
            of_scores += product(grad, u, SPLIT, OF, PRECISION)
            of_started += product(grad, turned, SPLIT, OF, PRECISION)
            of_ended += product(beta[:, None] * value, tl.trans(of_state), SPLIT, OF, PRECISION)
            if beta_ptr is not None:
                of_u = read(of_values_ptr + of_rows, in_rows)
                dbeta += tl.sum(of_u * value, 1)
                of_u *= -beta[:, None]
                of_pairs += product(of_u, u, SPLIT, OF, PRECISION)
                of_started_k += product(of_u, turned, SPLIT, OF, PRECISION)
        next_there = (first + at + 1 < end) & (at + 1 < C)
        weights, started, ended = weights_of(decay_ptr, place, there, next_there, heads, C)
        vectors = factors_ptr + line.to(tl.int64) * 4 * C + at
        of_line = (position * (heads // group) + head // group) * size_k
        of_line, in_line = of_line[:, None] + row[None, :], there[:, None] & in_k[None, :]
        q = tl.load(vectors)[:, None] * read(q_ptr + of_line, in_line)
        k = tl.load(vectors + C)[:, None] * read(k_ptr + of_line, in_line)
        strictly = at[:, None] > at[None, :]
        if beta_ptr is not None:  # here: the weights are not held longer
            of_pairs = tl.where(strictly, of_pairs * weights, 0.0)
        of_scores = of_scores * weights
        of_queries = product(of_scores, k, SPLIT, OF, PRECISION)
        of_keys = product(tl.trans(of_scores), q, SPLIT, OF, PRECISION)
        of_queries += started[:, None] * of_started
        of_keys += ended[:, None] * of_ended
        if beta_ptr is not None:
            of_keys += product(of_pairs + tl.trans(of_pairs), k, SPLIT, OF, PRECISION)
            of_keys += started[:, None] * of_started_k
        to = place[:, None] * size_k + row[None, :]
        if of_queries_ptr is not None:
            tl.store(of_queries_ptr + to, of_queries, in_line)
        if of_keys_ptr is not None:
            tl.store(of_keys_ptr + to, of_keys, in_line)
        if of_decay_ptr is not None:
            # a pair of positions has the decays after the first one, up to the second one
            turned = tl.trans(k)
            pairs = of_scores * product(q, turned, SPLIT, OF, PRECISION)
            if beta_ptr is not None:
                pairs += of_pairs * product(k, turned, SPLIT, OF, PRECISION)
            before = tl.where(at[:, None] >= at[None, :], tl.cumsum(pairs, 1) - pairs, 0.0)
            of_decay = tl.sum(before, 0)
            later = started * tl.sum(q * of_started + k * of_started_k, 1)
            earlier = ended * tl.sum(k * of_ended, 1)
            of_decay += tl.cumsum(later, 0, reverse=True) + (tl.cumsum(earlier, 0) - earlier)
            # the decays of the whole chunk: beyond the end of a sequence there are none
            of_decay += tl.load(factors_ptr + line.to(tl.int64) * 4 * C + 3 * C - 1) * tl.sum(whole, 0)
            tl.store(of_decay_ptr + block.to(tl.int64) * n_rows * heads + place, of_decay, there)
        if dbeta_ptr is not None:
            result = rounded(dbeta, dbeta_ptr)  # which each block has
            if block == 0:
                tl.store(dbeta_ptr + place, result, there)


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

"""Linear attention in Triton, backward: the state before each chunk again, then the gradients of states, then the rest.

    forward again   The walk of ``_linear_attention.py`` writes the state before each chunk and, for the delta rule,
                    what u is without beta.
    walk back       A program has some columns of the gradient of a state, in registers, and walks from the last chunk
                    to the first. It writes the gradient of the state after each chunk, and that of v.
    the rest        ``_linear_attention_chunk_gradients.py``.

There are no atomics.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from fusedops.ops.linear_attention.arguments import LinearAttentionGradArgs
from fusedops_triton._jit._bias import rounded
from fusedops_triton._jit._common import read
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch import settings
from fusedops_triton.launch.chips import CHIPS
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div
from fusedops_triton.linear_attention._linear_attention import walk
from fusedops_triton.linear_attention._linear_attention_chunk_gradients import Walked, chunk_gradients
from fusedops_triton.linear_attention._linear_attention_parts import (
    FACTORS,
    Call,
    Parts,
    Sizes,
    call_of,
    columns_of,
    parts_of,
    product,
    product_by_matrix,
    stages_of,
    types_of,
    units,
)
from fusedops_triton.norms._norm import ready

# ---------------------------------------------------------------------------------------------------------- launchers


def linear_attention_backward(a: LinearAttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients in chunks of positions, from the states before them, which are computed again."""
    call = call_of(a.q, a.k, a.v, a.decay, a.beta, a.scale, a.normalize, a.initial_state, a.cu_seqlens)
    return linear_attention_gradients(call, a.grad_out, a.grad_state if a.return_state else None, a.needs)


def linear_attention_gradients(
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
        chunk_gradients(call, parts, grad_out, walked, results)
    return tuple(results)


def _walk_both(
    call: Call, parts: Parts, grad_out: Tensor, of_end: Tensor | None, dv: Tensor | None, of_start: Tensor | None
) -> Walked:
    """Compute the states, and the gradients that pass from chunk to chunk; write those of v and of the first states."""
    sizes, v = call.sizes, call.v
    shape = (sizes.numbers, sizes.heads, sizes.size_k, sizes.size_v)
    states = torch.empty(shape, dtype=torch.float32, device=v.device)
    values = v if call.beta is None else torch.empty(v.shape, dtype=torch.float32, device=v.device)
    walk(call, parts, None, None, states, None if call.beta is None else values)
    walked = Walked(states, values, torch.empty_like(states), torch.empty_like(v, dtype=torch.float32))
    outputs = (dv, walked.of_values, walked.of_states, of_start)
    _back_launch(sizes)(v, *outputs, grad_out, of_end, call.q, call.k, call.beta, call.bounds, *parts)
    return walked


@cached_by_layout
def _back_launch(sizes: Sizes) -> Launch:
    (size_k, size_v), by = units(sizes)
    columns = columns_of(sizes, sizes.least_side)
    blocks = ceil_div(sizes.size_v, columns.cols)
    constants = {**by, "C": sizes.chunk, **columns.constants, "STAGES": stages_of(sizes)}
    constants |= types_of(_walk_back, sizes.split)
    numbers = (sizes.positions, sizes.chunks, sizes.heads, sizes.group, size_k, size_v, blocks)
    other = sizes.split and settings.chip.nvidia and settings.chip != CHIPS["sm_90"]
    warps = 8 if other else columns.warps  # of 4, up to 64 bytes of a thread spill there
    return Launch(_walk_back, (sizes.sequences * sizes.heads * blocks,), numbers, constants, warps)


# ------------------------------------------------------------------------------------------------------ jit functions
# size_k and size_v are over UNIT_K and UNIT_V, as in ``_linear_attention.py``.


@profiled(do_not_specialize=["positions", "chunks", "heads", "group", "size_k", "size_v", "blocks"])
def _walk_back(
    dv_ptr, of_values_ptr, of_states_ptr, of_start_ptr, grad_ptr, of_end_ptr, q_ptr, k_ptr, beta_ptr, bounds_ptr,
    products_ptr, inverse_ptr, factors_ptr, positions, chunks, heads, group, size_k, size_v, blocks,
    UNIT_K: tl.constexpr, UNIT_V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, HALVES: tl.constexpr,
    BV: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, OF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk back over the chunks with BV columns of the gradient of a state. Grid (sequences * Hv * blocks,).

    The gradient is transposed, in HALVES of BK, as the state in ``_walk``.
    """
    size_k, size_v = size_k * UNIT_K, size_v * UNIT_V
    line, sequence = tl.program_id(0) // blocks, tl.program_id(0) // blocks // heads
    head = line % heads
    at, row = tl.arange(0, C), tl.arange(0, BK)
    col = (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    of_state = row[None, :] * size_v + col[:, None]
    in_v = col < size_v
    in_state, in_other = in_v[:, None] & (row < size_k)[None, :], in_v[:, None] & (row < size_k - BK)[None, :]
    if bounds_ptr is None:
        base, start, end = sequence.to(tl.int64) * positions, 0, positions
        number = sequence * chunks
    else:
        base, start, end = tl.full([], 0, tl.int64), tl.load(bounds_ptr + sequence), tl.load(bounds_ptr + sequence + 1)
        number = start // C + sequence
    state, other = tl.zeros((BV, BK), tl.float32), tl.zeros((BV, BK), tl.float32)
    if of_end_ptr is not None:
        of_end_ptr += line.to(tl.int64) * size_k * size_v + of_state
        state = read(of_end_ptr, in_state)
        if HALVES == 2:
            other = read(of_end_ptr + BK * size_v, in_other)
    own = (end - start + C - 1) // C
    width = heads // group * size_k
    for turn in tl.range(0, own, num_stages=STAGES):
        first, here = start + (own - 1 - turn) * C, (number + own - 1 - turn).to(tl.int64) * heads + head
        there = first + at < end
        position = base + first + at
        of_keys = position * width + head // group * size_k
        of_keys, in_keys = of_keys[:, None] + row[None, :], there[:, None] & (row < size_k)[None, :]
        in_others = there[:, None] & (row < size_k - BK)[None, :]
        of_values = position * (heads * size_v) + head * size_v
        of_values, in_values = of_values[None, :] + col[:, None], there[None, :] & in_v[:, None]
        vectors = factors_ptr + here * FACTORS * C + at
        to = of_states_ptr + ((here * size_k + row) * size_v)[None, :] + col[:, None]
        tl.store(to, state, in_state)
        if HALVES == 2:
            tl.store(to + BK * size_v, other, in_other)
        grad = read(grad_ptr + of_values, in_values).to(grad_ptr.dtype.element_ty)
        k = tl.load(k_ptr + of_keys, in_keys, 0.0)
        of_u = product(state, tl.trans(k), SPLIT, OF, PRECISION)
        if HALVES == 2:
            other_k = tl.load(k_ptr + of_keys + BK, in_others, 0.0)
            of_u = product(other, tl.trans(other_k), SPLIT, OF, PRECISION, None, of_u)
        of_u *= tl.load(vectors + 7 * C)[None, :]
        of_u = product_by_matrix(grad, products_ptr, here, False, C, SPLIT, OF, PRECISION, of_u)
        passed = tl.load(factors_ptr + here * FACTORS * C + 3 * C - 1)
        of_out = tl.load(vectors + 5 * C)[None, :] * grad
        q = tl.load(q_ptr + of_keys, in_keys, 0.0)
        state = product(of_out, q, SPLIT, OF, PRECISION, None, passed * state)
        if HALVES == 2:
            q = tl.load(q_ptr + of_keys + BK, in_others, 0.0)
            other = product(of_out, q, SPLIT, OF, PRECISION, None, passed * other)
        if beta_ptr is not None:
            beta = tl.load(vectors + 4 * C)[None, :]
            of_u = product_by_matrix(-beta * of_u, inverse_ptr, here, False, C, SPLIT, OF, PRECISION, of_u)
        tl.store(of_values_ptr + of_values, of_u, in_values)
        if beta_ptr is not None:
            of_u *= beta
        if dv_ptr is not None:
            tl.store(dv_ptr + of_values, rounded(of_u, dv_ptr), in_values)
        if beta_ptr is not None:
            of_u *= -tl.load(vectors + 6 * C)[None, :]
            state = product(of_u, k, SPLIT, OF, PRECISION, None, state)
            if HALVES == 2:
                other = product(of_u, other_k, SPLIT, OF, PRECISION, None, other)
    if of_start_ptr is not None:
        to = of_start_ptr + line.to(tl.int64) * size_k * size_v + of_state
        tl.store(to, rounded(state, of_start_ptr), in_state)
        if HALVES == 2:
            tl.store(to + BK * size_v, rounded(other, of_start_ptr), in_other)

"""Linear attention in Triton, forward: in chunks of positions, or one position after another where there are few.

    chunks     After what ``_linear_attention_parts.py`` computes, a program has some columns of the state of a sequence
               and value head, in registers, and walks over the chunks.
    few        A program has the same columns, and walks over the positions.

Common to both:

- The arithmetic is in float32, and no product is that of TF32. Where q, k and v have 16 bits, products with a state or
  with values are on tensor cores, of operands that are sums of two of bfloat16; those of queries and keys are exact.
- A sum of decays is never the difference of two others, so that -inf gives 0 and no NaN.
- Tensors are made contiguous if they are not. There are no atomics.
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

from fusedops.ops.linear_attention.arguments import LinearAttentionArgs
from fusedops_triton._jit._bias import rounded
from fusedops_triton._jit._common import exp, read, scalar
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div
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
    rnorm_of,
    stages_of,
    types_of,
    units,
)

#: Positions for each sequence up to which they are computed one after another.
FEW = 16

# ---------------------------------------------------------------------------------------------------------- launchers


def linear_attention(a: LinearAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op with one decay for each head, or none, in chunks of positions; few positions one by one."""
    return linear_attention_forward(
        call_of(a.q, a.k, a.v, a.decay, a.beta, a.scale, a.normalize, a.initial_state, a.cu_seqlens)
    )


def linear_attention_forward(call: Call) -> tuple[Tensor, Tensor]:
    """Compute out, (B, S, Hv, Dv) in the dtype of v, and the states, (B or N, Hv, Dk, Dv) float32; both contiguous."""
    sizes = call.sizes
    out = torch.empty_like(call.v) if call.bounds is None else torch.zeros_like(call.v)
    shape = (sizes.sequences, sizes.heads, sizes.size_k, sizes.size_v)
    state = torch.empty(shape, dtype=torch.float32, device=call.v.device)
    if state.numel() == 0 or out.numel() == 0:
        return out.zero_(), state.zero_() if call.state is None else state.copy_(call.state)
    if sizes.positions <= FEW * (sizes.sequences if sizes.packed else 1):
        launch = _steps_launch(sizes, call.normalize)
        launch(out, out, state, call.q, call.k, call.v, call.decay, call.beta, call.state, call.bounds, call.scale)
    else:
        walk(call, parts_of(call), out, state, None, None)
    return out, state


def walk(
    call: Call,
    parts: Parts,
    out: Tensor | None,
    state: Tensor | None,
    states: Tensor | None,
    differences: Tensor | None,
) -> None:
    """Compute the states from chunk to chunk, and what is wanted of them.

    Args:
        call: the call.
        parts: of its chunks.
        out: (B, S, Hv, Dv) for the results, or None.
        state: (B or N, Hv, Dk, Dv) for the last states, or None.
        states: (numbers, Hv, Dk, Dv) for the state before each chunk, or None.
        differences: (B, S, Hv, Dv), float32, for ``v - H.T @ k`` of each position, or None.
    """
    launch = _walk_launch(call.sizes)
    inputs = (call.q, call.k, call.v, call.beta, call.state, call.bounds)
    launch(call.v, out, state, states, differences, *inputs, *parts)


@cached_by_layout
def _walk_launch(sizes: Sizes) -> Launch:
    (size_k, size_v), by = units(sizes)
    columns = columns_of(sizes, sizes.least_side)
    blocks = ceil_div(sizes.size_v, columns.cols)
    constants = {**by, "C": sizes.chunk, **columns.constants, "STAGES": stages_of(sizes)}
    constants |= types_of(_walk, sizes.split)
    numbers = (sizes.positions, sizes.chunks, sizes.heads, sizes.group, size_k, size_v, blocks)
    return Launch(_walk, (sizes.sequences * sizes.heads * blocks,), numbers, constants, columns.warps)


@cached_by_layout
def _steps_launch(sizes: Sizes, normalize: bool) -> Launch:
    (size_k, size_v), by = units(sizes)
    columns = columns_of(sizes, 1)
    blocks = ceil_div(sizes.size_v, columns.cols)
    constants = {**by, "NORMALIZE": normalize, "BK": columns.rows, "BV": columns.cols}
    numbers = (sizes.positions, sizes.heads, sizes.group, size_k, size_v, blocks)
    return Launch(_steps, (sizes.sequences * sizes.heads * blocks,), numbers, constants, columns.warps)


# ------------------------------------------------------------------------------------------------------ jit functions
# UNIT_K and UNIT_V give the compiler the alignment of rows, also of those whose sizes are not multiples of 16.


@profiled(do_not_specialize=["positions", "chunks", "heads", "group", "size_k", "size_v", "blocks"])
def _walk(
    out_ptr, state_ptr, states_ptr, differences_ptr, q_ptr, k_ptr, v_ptr, beta_ptr, initial_ptr, bounds_ptr,
    products_ptr, inverse_ptr, factors_ptr, positions, chunks, heads, group, size_k, size_v, blocks,
    UNIT_K: tl.constexpr, UNIT_V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, HALVES: tl.constexpr,
    BV: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, OF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk over the chunks of a sequence with BV columns of a state. Grid (sequences * Hv * blocks,). See ``walk``.

    size_k, size_v: over UNIT_K and UNIT_V. chunks: of a sequence without bounds. The state is transposed, in HALVES of
    BK: it, or u, is always the first factor of a product, which tensor cores read from the registers that hold it.
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
    state = tl.zeros((BV, BK), tl.float32)
    other = tl.zeros((BV, BK), tl.float32)
    if initial_ptr is not None:
        initial_ptr += line.to(tl.int64) * size_k * size_v + of_state
        state = read(initial_ptr, in_state)
        if HALVES == 2:
            other = read(initial_ptr + BK * size_v, in_other)
    width = heads // group * size_k
    for first in tl.range(start, end, C, num_stages=STAGES):
        there = first + at < end
        position = base + first + at
        of_keys = position * width + head // group * size_k
        of_keys, in_keys = of_keys[:, None] + row[None, :], there[:, None] & (row < size_k)[None, :]
        in_others = there[:, None] & (row < size_k - BK)[None, :]
        of_values = position * (heads * size_v) + head * size_v
        of_values, in_values = of_values[None, :] + col[:, None], there[None, :] & in_v[:, None]
        here = number.to(tl.int64) * heads + head
        # the same places, computed again: else they are held in registers from the loads of this chunk on
        to_values = ((position * heads + head) * size_v)[None, :] + col[:, None]
        vectors = factors_ptr + here * FACTORS * C + at
        if states_ptr is not None:
            to = states_ptr + ((here * size_k + row) * size_v)[None, :] + col[:, None]
            tl.store(to, state, in_state)
            if HALVES == 2:
                tl.store(to + BK * size_v, other, in_other)
        u = read(v_ptr + of_values, in_values)
        k = tl.load(k_ptr + of_keys, in_keys, 0.0)
        if HALVES == 2:
            other_k = tl.load(k_ptr + of_keys + BK, in_others, 0.0)
        if beta_ptr is not None:
            expected = product(state, tl.trans(k), SPLIT, OF, PRECISION)
        if out_ptr is not None:
            q = tl.load(q_ptr + of_keys, in_keys, 0.0)
            out = product(state, tl.trans(q), SPLIT, OF, PRECISION)
        if HALVES == 2:
            if beta_ptr is not None:
                expected = product(other, tl.trans(other_k), SPLIT, OF, PRECISION, None, expected)
            if out_ptr is not None:
                q = tl.load(q_ptr + of_keys + BK, in_others, 0.0)
                out = product(other, tl.trans(q), SPLIT, OF, PRECISION, None, out)
        if beta_ptr is not None:
            beta = tl.load(vectors + 4 * C)[None, :]
            u -= tl.load(vectors + 6 * C)[None, :] * expected
            u = product_by_matrix(-beta * u, inverse_ptr, here, True, C, SPLIT, OF, PRECISION, u)
            if differences_ptr is not None:
                tl.store(differences_ptr + to_values, u, in_values)
            u *= beta
        if out_ptr is not None:
            out *= tl.load(vectors + 5 * C)[None, :]
            out = product_by_matrix(u, products_ptr, here, True, C, SPLIT, OF, PRECISION, out)
            tl.store(out_ptr + to_values, rounded(out, out_ptr), in_values)
        # the decays of the whole chunk: beyond the end of a sequence there are none
        passed = tl.load(factors_ptr + here * FACTORS * C + 3 * C - 1)
        u *= tl.load(vectors + 7 * C)[None, :]
        state = product(u, k, SPLIT, OF, PRECISION, None, passed * state)
        if HALVES == 2:
            other = product(u, other_k, SPLIT, OF, PRECISION, None, passed * other)
        number += 1
    if state_ptr is not None:
        to = state_ptr + ((line.to(tl.int64) * size_k + row) * size_v)[None, :] + col[:, None]
        tl.store(to, state, in_v[:, None] & (row < size_k)[None, :])
        if HALVES == 2:
            tl.store(to + BK * size_v, other, in_v[:, None] & (row + BK < size_k)[None, :])


@profiled(do_not_specialize=["scale", "positions", "heads", "group", "size_k", "size_v", "blocks"])
def _steps(
    out_ptr, state_ptr, q_ptr, k_ptr, v_ptr, decay_ptr, beta_ptr, initial_ptr, bounds_ptr, scale,
    positions, heads, group, size_k, size_v, blocks,
    UNIT_K: tl.constexpr, UNIT_V: tl.constexpr, NORMALIZE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Walk over the positions of a sequence with BV columns of a state. Grid (sequences * Hv * blocks,).

    size_k, size_v: over UNIT_K and UNIT_V.
    """
    size_k, size_v = size_k * UNIT_K, size_v * UNIT_V
    line, sequence = tl.program_id(0) // blocks, tl.program_id(0) // blocks // heads
    head = line % heads
    row, col = tl.arange(0, BK), (tl.program_id(0) % blocks) * BV + tl.arange(0, BV)
    in_k, in_v = row < size_k, col < size_v
    of_state = line.to(tl.int64) * size_k * size_v + row[:, None] * size_v + col[None, :]
    in_state = in_k[:, None] & in_v[None, :]
    if bounds_ptr is None:
        base, start, end = sequence.to(tl.int64) * positions, 0, positions
    else:
        base, start, end = tl.full([], 0, tl.int64), tl.load(bounds_ptr + sequence), tl.load(bounds_ptr + sequence + 1)
    state = tl.zeros((BK, BV), tl.float32)
    if initial_ptr is not None:
        state = read(initial_ptr + of_state, in_state)
    for at in range(start, end):
        position = base + at
        of_head = position * heads + head
        of_keys = (position * (heads // group) + head // group) * size_k + row
        q, k = read(q_ptr + of_keys, in_k), read(k_ptr + of_keys, in_k)
        if NORMALIZE:
            q, k = q * rnorm_of(tl.sum(q * q, 0), True), k * rnorm_of(tl.sum(k * k, 0), True)
        u = read(v_ptr + of_head * size_v + col, in_v)
        if decay_ptr is not None:
            state *= exp(tl.load(decay_ptr + of_head).to(tl.float32))
        if beta_ptr is not None:
            u -= tl.sum(k[:, None] * state, 0)
            u *= tl.load(beta_ptr + of_head).to(tl.float32)
        state += k[:, None] * u[None, :]
        out = tl.sum((q * scalar(scale))[:, None] * state, 0)
        tl.store(out_ptr + of_head * size_v + col, rounded(out, out_ptr), in_v)
    tl.store(state_ptr + of_state, state, in_state)

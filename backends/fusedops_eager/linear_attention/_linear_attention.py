"""Linear attention in chunks of positions, by matmuls in plain torch.

Within a chunk the products of all pairs of positions are one matmul, and a triangular solve is the delta rule; from
chunk to chunk passes the state. Backward computes the states before each chunk again: what it keeps is one for each
chunk, not for each position. A chunk has positions of one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fusedops.dtypes import arithmetic, no_autocast
from fusedops.ops.linear_attention.arguments import LinearAttentionArgs, LinearAttentionGradArgs, bounds_of
from fusedops.ops.linear_attention.formulas import normalized_gradient, rnorm_of, scale_of
from fusedops_eager.linear_attention._decays import HeadDecay, NoDecay, RowDecay

CHUNK = 64  # positions, a power of two


class Chunk(NamedTuple):
    """The numbers of a chunk in the dtype of the arithmetic: (B, G, R, C, ...), G key heads of R value heads each.

    Attributes:
        q: (B, G, 1, C, Dk), normalized and scaled.
        k: (B, G, 1, C, Dk), normalized.
        v: (B, G, R, C, Dv).
        decay: the decays.
        beta: (B, G, R, C, 1), or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: NoDecay
    beta: Tensor | None


class Sequence(NamedTuple):
    """The chunks of a sequence, and the slice of the states that is its own.

    Attributes:
        states: of the initial states and those returned.
        chunks: the first and the end position of each chunk.
    """

    states: slice
    chunks: list[tuple[int, int]]


class Call:
    """The tensors of a call, chunk by chunk. The arguments are those of the op."""

    def __init__(self, a: LinearAttentionArgs | LinearAttentionGradArgs) -> None:
        q, v = a.q, a.v
        self.dtype = arithmetic(q, a.k, v, a.decay, a.beta, a.initial_state)
        self.q, self.k, self.v, self.decay, self.beta = q, a.k, v, a.decay, a.beta
        self.scale, self.normalize = scale_of(q, a.scale), a.normalize
        self.groups = q.shape[2], (v.shape[2] // q.shape[2] if q.shape[2] else 1)
        self.sequences = list(_sequences(q.shape[1], a.cu_seqlens))
        count = v.shape[0] if a.cu_seqlens is None else a.cu_seqlens.shape[0] - 1
        shape = (count, v.shape[2], q.shape[3], v.shape[3])
        state = v.new_zeros(shape, dtype=self.dtype) if a.initial_state is None else a.initial_state.to(self.dtype)
        self.state = cast("Tensor", state.unflatten(1, self.groups))

    def by_head(self, x: Tensor) -> Tensor:
        """Return (B, G, R, C, ...) of (B, C, Hv, ...) in the dtype of the arithmetic."""
        return cast("Tensor", x.to(self.dtype).unflatten(2, self.groups)).movedim(1, 3)

    def of_keys(self, x: Tensor, start: int, end: int) -> Tensor:
        """Return a chunk of q or k, (B, G, 1, C, Dk), normalized where that is asked for."""
        rows = x[:, start:end].to(self.dtype).transpose(1, 2).unsqueeze(2).contiguous()
        return rows * rnorm_of(rows) if self.normalize else rows

    def chunk(self, start: int, end: int) -> Chunk:
        """Return the numbers of a chunk. With a decay of each row it is filled up to a power of two positions."""
        q, k, v = self.of_keys(self.q, start, end) * self.scale, self.of_keys(self.k, start, end), self.v[:, start:end]
        v = self.by_head(v)
        beta = None if self.beta is None else self.by_head(self.beta[:, start:end])[..., None]
        if self.decay is None:
            return Chunk(q, k, v, NoDecay(), beta)
        logs = self.by_head(self.decay[:, start:end])
        if self.decay.dim() == 3:
            return Chunk(q, k, v, HeadDecay(logs), beta)
        filled = _filled(end - start)
        q, k, v, logs = (_with_rows(each, filled) for each in (q, k, v, logs))
        return Chunk(q, k, v, RowDecay(logs), None if beta is None else _with_rows(beta, filled))


def _sequences(positions: int, cu_seqlens: Tensor | None) -> Iterator[Sequence]:
    """Yield the sequences of a call: one for all batches, or the packed ones."""
    if cu_seqlens is None:
        yield Sequence(slice(None), _chunks(0, positions))
        return
    bounds = bounds_of("linear_attention", cu_seqlens, positions)
    for n, (start, end) in enumerate(pairwise(bounds)):
        yield Sequence(slice(n, n + 1), _chunks(start, end))


def _chunks(start: int, end: int) -> list[tuple[int, int]]:
    return [(at, min(at + CHUNK, end)) for at in range(start, end, CHUNK)]


def _filled(size: int) -> int:
    """Return the power of two from a size on."""
    return 1 << max(size - 1, 0).bit_length()


def _with_rows(x: Tensor, size: int) -> Tensor:
    """Return rows (..., C, D) with zeros after them: positions that change nothing."""
    missing = size - x.shape[-2]
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def _solved(lower: Tensor, right: Tensor, *, transposed: bool = False) -> Tensor:
    """Return the solution of ``(I + lower) @ u = right``, or of the transposed system; lower is below the diagonal."""
    if lower.shape[-1] == 1:
        return right
    matrix = lower.mT if transposed else lower
    return cast("Tensor", torch.linalg.solve_triangular(matrix, right, upper=transposed, unitriangular=True))


class _Written(NamedTuple):
    """The values that a chunk writes into the state.

    Attributes:
        u: (B, G, R, C, Dv).
        difference: ``v - H.T @ k`` at each position, or v without beta.
        products: of the keys with each other, or None without beta.
    """

    u: Tensor
    difference: Tensor
    products: Tensor | None


def _written(chunk: Chunk, state: Tensor, *, difference: bool) -> _Written:
    """Return what a chunk writes; ``difference`` only where it is asked for."""
    if chunk.beta is None:
        return _Written(chunk.v, chunk.v, None)
    products = chunk.decay.products(chunk.k, chunk.k, -1)
    right = chunk.v - chunk.decay.started(chunk.k) @ state
    u = _solved(chunk.beta * products, chunk.beta * right)
    return _Written(u, right - products @ u if difference else right, products)


def _next(chunk: Chunk, state: Tensor, u: Tensor) -> Tensor:
    """Return the state after a chunk."""
    return chunk.decay.passed(state) + chunk.decay.ended(chunk.k).mT @ u


def linear_attention(a: LinearAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute out (B, S, Hv, Dv) in the dtype of v, and the states (B or N, Hv, Dk, Dv), float32 or float64."""
    with no_autocast(a.q.device.type):
        return _forward(a)


def _forward(a: LinearAttentionArgs) -> tuple[Tensor, Tensor]:
    call = Call(a)
    out = a.v.new_empty(a.v.shape) if a.cu_seqlens is None else a.v.new_zeros(a.v.shape)
    states = torch.empty_like(call.state, memory_format=torch.contiguous_format)
    for sequence in call.sequences:
        state = call.state[sequence.states]
        for start, end in sequence.chunks:
            chunk = call.chunk(start, end)
            u = _written(chunk, state, difference=False).u
            rows = chunk.decay.started(chunk.q) @ state + chunk.decay.products(chunk.q, chunk.k) @ u
            out[:, start:end].copy_(rows[..., : end - start, :].movedim(3, 1).flatten(2, 3))
            state = _next(chunk, state, u)
        states[sequence.states] = state
    return out, states.flatten(1, 2)


class Gradients(NamedTuple):
    """The gradients of a chunk, in the dtype of the arithmetic, and of the state before it."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    state: Tensor


def _chunk_gradients(chunk: Chunk, state: Tensor, grad: Tensor, of_next: Tensor) -> Gradients:
    """Return the gradients of a chunk; that of the decays is added up by ``chunk.decay``.

    Args:
        chunk: the chunk.
        state: before it.
        grad: the gradient of its rows of out, (B, G, R, C, Dv).
        of_next: the gradient of the state after it.
    """
    decay, beta = chunk.decay, chunk.beta
    written = _written(chunk, state, difference=True)
    u = written.u
    started, ended, passed = decay.started(chunk.q), decay.ended(chunk.k), decay.passed(state)
    scores = decay.products(chunk.q, chunk.k)
    du = scores.mT @ grad + ended @ of_next
    dq, dk = decay.products_gradient((grad @ u.mT).tril_(), scores, chunk.q, chunk.k)
    dstarted, dended = grad @ state.mT, u @ of_next.mT
    dq = dq + decay.started(dstarted)
    dk = dk + decay.ended(dended)
    of_state = decay.passed(of_next) + started.mT @ grad
    dbeta, dv, of_started = None, du, started * dstarted
    if beta is not None and written.products is not None:
        solved = _solved(beta * written.products, du, transposed=True)
        dbeta, dv = (solved * written.difference).sum(-1), beta * solved
        of_pairs = (dv @ u.mT).neg_().tril_(-1)
        for each in decay.products_gradient(of_pairs, written.products, chunk.k, chunk.k):
            dk = dk + each
        started_k, dstarted_k = decay.started(chunk.k), -(dv @ state.mT)
        dk = dk + decay.started(dstarted_k)
        of_started = of_started + started_k * dstarted_k
        of_state = of_state - started_k.mT @ dv
    decay.add_gradient(of_started, ended * dended, passed * of_next)
    return Gradients(dq.sum(2, keepdim=True), dk.sum(2, keepdim=True), dv, dbeta, of_state)


def linear_attention_backward(a: LinearAttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k, v, decay, beta and initial_state in their dtypes; None where not wanted."""
    with no_autocast(a.q.device.type):
        return _backward(a)


def _backward(a: LinearAttentionGradArgs) -> tuple[Tensor | None, ...]:
    call, grad_state = Call(a), a.grad_state if a.return_state else None
    inputs = (a.q, a.k, a.v, a.decay, a.beta)
    make = torch.empty_like if a.cu_seqlens is None else torch.zeros_like
    results = [
        make(each, memory_format=torch.contiguous_format) if need and each is not None else None
        for each, need in zip(inputs, a.needs)
    ]
    of_start = torch.empty_like(call.state, memory_format=torch.contiguous_format)
    for sequence in call.sequences:
        states = [call.state[sequence.states]]
        for start, end in sequence.chunks[:-1]:
            chunk = call.chunk(start, end)
            states.append(_next(chunk, states[-1], _written(chunk, states[-1], difference=False).u))
        if grad_state is None:
            of_next = torch.zeros_like(states[0])
        else:
            of_next = cast("Tensor", grad_state[sequence.states].to(call.dtype).unflatten(1, call.groups))
        for (start, end), state in zip(reversed(sequence.chunks), reversed(states)):
            chunk = call.chunk(start, end)
            grad = _with_rows(call.by_head(a.grad_out[:, start:end]), chunk.v.shape[-2])
            of = _chunk_gradients(chunk, state, grad, of_next)
            of_next = of.state
            _write(call, of, chunk.decay.gradient(), start, end, results)
        of_start[sequence.states] = of_next
    if a.initial_state is None or not a.needs[5]:
        return (*results, None)
    return (*results, of_start.flatten(1, 2).to(a.initial_state.dtype))


def _write(
    call: Call, of: Gradients, ddecay: Tensor | None, start: int, end: int, results: list[Tensor | None]
) -> None:
    """Write the gradients of a chunk into those of the call."""
    dq, dk = of.q[..., : end - start, :] * call.scale, of.k[..., : end - start, :]
    if call.normalize:
        dq, dk = (_of_normalized(call, *each, start, end) for each in ((dq, call.q), (dk, call.k)))
    given = (dq, dk, of.v, ddecay, of.beta)
    for result, each in zip(results, given):
        if result is not None and each is not None:
            result[:, start:end].copy_(each[:, :, :, : end - start].movedim(3, 1).flatten(2, 3))


def _of_normalized(call: Call, grad: Tensor, x: Tensor, start: int, end: int) -> Tensor:
    """Return the gradient of a chunk of q or k from that of its normalized rows."""
    rows = x[:, start:end].to(call.dtype).transpose(1, 2).unsqueeze(2)
    rnorm = rnorm_of(rows)
    return normalized_gradient(grad, rows * rnorm, rnorm)

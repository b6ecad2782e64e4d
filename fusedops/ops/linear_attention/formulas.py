"""Linear attention in plain torch, one position after another: the recurrence, packed sequences, and the gradients.

q and k are repeated for each value head here; kernels need not.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fusedops._named_tuple import NamedTuple
from fusedops.constraints import Offsets
from fusedops.dtypes import arithmetic

EPS = 1e-6  # of the normalization of q and k, as in transformers


def scale_of(q: Any, scale: float | None) -> float:
    """Return the scale of a call: 1 / sqrt(Dk) where it is None."""
    return 1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale


def rnorm_of(x: Tensor) -> Tensor:
    """Return the factor that normalizes each row of q or k: (..., 1)."""
    return (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def normalized_gradient(grad: Tensor, normed: Tensor, rnorm: Tensor) -> Tensor:
    """Return the gradient of x from that of ``normed``, which is ``x * rnorm``."""
    return (grad - normed * (normed * grad).sum(-1, keepdim=True)) * rnorm


class Packed(NamedTuple):
    """The packed sequences of a row of S positions, from their N + 1 bounds.

    Attributes:
        first: the first position of each sequence, (N,) int64, below S where there are positions.
        last: the last position, (N,), as ``first``.
        empty: True for a sequence without positions, (N,).
        number: the sequence of each position, (S,) int64, in [0, N).
        inside: True for a position of a sequence, (S,).
        begins: True for the first position of a sequence, (S,).
        ends: True for the last one, (S,).
    """

    first: Tensor
    last: Tensor
    empty: Tensor
    number: Tensor
    inside: Tensor
    begins: Tensor
    ends: Tensor


def packed_of(cu_seqlens: Tensor, positions: int) -> Packed:
    """Return the packed sequences."""
    bounds = Offsets.within(cu_seqlens, positions)
    at = torch.arange(positions, device=bounds.device)
    count, most = bounds.shape[0] - 1, max(positions - 1, 0)
    number = (at[:, None] >= bounds).sum(-1) - 1
    inside = (number >= 0) & (number < count)
    number = number.clamp(0, max(count - 1, 0))
    start, end = bounds[:-1], bounds[1:]
    begins = inside & (at == start.index_select(0, number))
    ends = inside & (at == end.index_select(0, number) - 1)
    first, last = start.clamp(max=most), (end - 1).clamp(0, most)
    return Packed(first, last, start == end, number, inside, begins, ends)


class Inputs(NamedTuple):
    """The numbers of each position in the dtype of the arithmetic, for each value head.

    Attributes:
        q: (B, S, Hv, Dk), normalized and scaled.
        k: (B, S, Hv, Dk), normalized.
        v: (B, S, Hv, Dv).
        factor: exp(decay), (B, S, Hv, 1 or Dk, 1), or None.
        beta: (B, S, Hv, 1), or None.
        state: before the first position, (B or N, Hv, Dk, Dv).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    factor: Tensor | None
    beta: Tensor | None
    state: Tensor


def prepare_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    normalize: bool,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Inputs:
    """Return the numbers of each position. The arguments are those of the op."""
    dtype = arithmetic(q, k, v, decay, beta, initial_state)
    wide_q, wide_k, heads = q.to(dtype), k.to(dtype), v.shape[2]
    if normalize:
        wide_q, wide_k = wide_q * rnorm_of(wide_q), wide_k * rnorm_of(wide_k)
    factor = None
    if decay is not None:
        factor = decay.to(dtype).exp().unsqueeze(-1)
        factor = factor.unsqueeze(-1) if decay.dim() == 3 else factor
    if initial_state is None:
        count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = wide_q.new_zeros(count, heads, q.shape[3], v.shape[3])
    else:
        state = initial_state.to(dtype)
    return Inputs(
        _for_value_heads(wide_q * scale_of(q, scale), heads),
        _for_value_heads(wide_k, heads),
        v.to(dtype),
        factor,
        None if beta is None else beta.to(dtype).unsqueeze(-1),
        state,
    )


def _for_value_heads(x: Tensor, heads: int) -> Tensor:
    """Return (B, S, Hv, D) of (B, S, Hk, D): value head h has key head h // (Hv // Hk)."""
    group = heads // max(x.shape[2], 1)
    return x if group == 1 else x.unsqueeze(3).expand(*x.shape[:3], group, x.shape[3]).flatten(2, 3)


class Step(NamedTuple):
    """The state at one position, (B, Hv, Dk, Dv) or (B, Hv, Dv).

    Attributes:
        decayed: H after the decay.
        difference: ``v - decayed.T @ k`` with beta, else v.
        u: what is written for the key.
        state: H after the position.
    """

    decayed: Tensor
    difference: Tensor
    u: Tensor
    state: Tensor


def step(inputs: Inputs, t: int, state: Tensor) -> Step:
    """Return the state at position t from the one after the position before."""
    k, v = inputs.k[:, t, :, :, None], inputs.v[:, t]
    decayed = state if inputs.factor is None else inputs.factor[:, t] * state
    if inputs.beta is None:
        difference = u = v
    else:
        difference = v - (k * decayed).sum(-2)
        u = inputs.beta[:, t] * difference
    return Step(decayed, difference, u, decayed + k * u.unsqueeze(-2))


def state_before(inputs: Inputs, t: int, state: Tensor, packed: Packed | None) -> Tensor:
    """Return the state before position t: the initial one where a packed sequence begins."""
    if packed is None:
        return state
    return torch.where(packed.begins[t], inputs.state.index_select(0, packed.number[t : t + 1]), state)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    normalize: bool,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return out in the dtype of v, and the state in the dtype of the arithmetic."""
    inputs = prepare_inputs(q, k, v, decay, beta, scale, normalize, initial_state, cu_seqlens)
    packed = None if cu_seqlens is None else packed_of(cu_seqlens, q.shape[1])
    outs: list[Tensor] = []
    states: list[Tensor] = []
    state = inputs.state if packed is None else inputs.state.new_zeros(1, *inputs.state.shape[1:])
    for t in range(q.shape[1]):
        state = step(inputs, t, state_before(inputs, t, state, packed)).state
        outs.append((inputs.q[:, t, :, :, None] * state).sum(-2))
        states.append(state)
    if not outs:
        return torch.zeros_like(v), inputs.state.clone()
    out = torch.stack(outs, 1)
    if packed is not None:
        out = out.masked_fill(~packed.inside[:, None, None], 0.0)
        after = torch.cat(states).index_select(0, packed.last)
        state = torch.where(packed.empty[:, None, None, None], inputs.state, after)
    return out.to(v.dtype), state


def gradients(
    grad_out: Tensor,
    grad_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    normalize: bool,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, decay, beta and the initial state in the dtype of the arithmetic.

    None for those of decay and beta where these are None; the gradient of the initial state is that of zeros then.
    """
    inputs = prepare_inputs(q, k, v, decay, beta, scale, normalize, initial_state, cu_seqlens)
    packed = None if cu_seqlens is None else packed_of(cu_seqlens, q.shape[1])
    steps: list[Step] = []
    state = inputs.state if packed is None else inputs.state.new_zeros(1, *inputs.state.shape[1:])
    for t in range(q.shape[1]):
        steps.append(step(inputs, t, state_before(inputs, t, state, packed)))
        state = steps[-1].state
    of_end = torch.zeros_like(inputs.state) if grad_state is None else grad_state.to(inputs.v.dtype)
    parts = _backward_steps(grad_out.to(inputs.v.dtype), of_end, inputs, steps, packed)
    if not steps:
        empty = [
            None if each is None else torch.zeros_like(each, dtype=inputs.v.dtype) for each in (q, k, v, decay, beta)
        ]
        return (*empty, of_end.clone())
    dq, dk, dv, ddecay, dbeta, before = (torch.stack(each, 1) if each else None for each in parts)
    assert dq is not None
    assert dk is not None
    assert dv is not None
    assert before is not None
    start = before[:, 0]
    if decay is not None and ddecay is not None and decay.dim() == 3:
        ddecay = ddecay.sum(-1)  # one decay for all rows
    if packed is not None:
        outside = ~packed.inside[:, None]
        dq, dk, dv = (each.masked_fill(outside[..., None], 0.0) for each in (dq, dk, dv))
        dbeta = None if dbeta is None else dbeta.masked_fill(outside, 0.0)
        if ddecay is not None:
            ddecay = ddecay.masked_fill(outside if ddecay.dim() == 3 else outside[..., None], 0.0)
        start = torch.where(packed.empty[:, None, None, None], of_end, before[0].index_select(0, packed.first))
    scaled = _of_key_heads(dq, q.shape[2]) * scale_of(q, scale)
    return (
        _of_rows(scaled, q, normalize),
        _of_rows(_of_key_heads(dk, q.shape[2]), k, normalize),
        dv,
        ddecay,
        dbeta,
        start,
    )


def _backward_steps(
    grad_out: Tensor, of_end: Tensor, inputs: Inputs, steps: list[Step], packed: Packed | None
) -> list[list[Tensor]]:
    """Return the gradients of each position in order: of q, k, v, decay by row, beta, and of the state before it."""
    parts: list[list[Tensor]] = [[], [], [], [], [], []]
    of_state = of_end if packed is None else torch.zeros_like(of_end[:1])
    for t in reversed(range(len(steps))):
        at, g = steps[t], grad_out[:, t, :, None]
        if packed is not None:
            own = of_end.index_select(0, packed.number[t : t + 1])
            of_state = torch.where(packed.ends[t], own, of_state)
        q, k = inputs.q[:, t, :, :, None], inputs.k[:, t, :, :, None]
        of_state = of_state + q * g
        du = (k * of_state).sum(-2)
        dk = (of_state * at.u.unsqueeze(-2)).sum(-1)
        if inputs.beta is not None:
            parts[4].append((du * at.difference).sum(-1))
            du = inputs.beta[:, t] * du
            dk = dk - (at.decayed * du.unsqueeze(-2)).sum(-1)
            of_state = of_state - k * du.unsqueeze(-2)
        parts[0].append((at.state * g).sum(-1))
        parts[1].append(dk)
        parts[2].append(du)
        if inputs.factor is not None:
            parts[3].append((of_state * at.decayed).sum(-1))
            of_state = inputs.factor[:, t] * of_state
        parts[5].append(of_state)
    return [each[::-1] for each in parts]


def _of_key_heads(grad: Tensor, heads: int) -> Tensor:
    """Return the sum over the value heads of each key head, (B, S, Hk, D)."""
    group = grad.shape[2] // max(heads, 1)
    return grad if group == 1 else grad.reshape(*grad.shape[:2], heads, group, grad.shape[3]).sum(3)


def _of_rows(grad: Tensor, x: Tensor, normalize: bool) -> Tensor:
    """Return the gradient of q or k from that of its normalized inputs."""
    if not normalize:
        return grad
    wide = x.to(grad.dtype)
    rnorm = rnorm_of(wide)
    return normalized_gradient(grad, wide * rnorm, rnorm)

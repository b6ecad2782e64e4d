"""The error bounds of linear_attention: of the state, column by column, as it passes from position to position.

A column of a state is off by the roundings of each position, which the next ones multiply by the decay and, with beta,
by ``I - beta * outer(k, k)``, whose norm is 1 where ``beta * sum(k**2)`` is at most 2. Sizes are norms of columns: of
the state, or the root of the sum of the squares of its terms, where these cancel. *Drift* is what the rounding of each
sum adds, all of one sign at worst. *Spread* is the square of what the roundings of products add, which have no common
sign; nor have the errors of several columns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops._contract.evidence import tolerances
from fusedops.dtypes import arithmetic
from fusedops.ops.linear_attention import formulas
from fusedops.ops.linear_attention.arguments import LinearAttentionArgs, LinearAttentionGradArgs
from fusedops.ops.linear_attention.formulas import Inputs

TOLERANCE = tolerances((2e-6, 2e-6), (2e-14, 1e-13), absolute=0.0, absolute_roundings=0.25)
_SUMS = 2e-6  # of the gradients of decays, which are sums of products in float32
_SPAN = 64  # positions over which kernels may sum decays before they subtract two such sums
_DEEPEST = 100.0  # beyond which the exponential of a decay is 0, or nearly so


class _Sizes(NamedTuple):
    """The sizes at each position: of all B * Hv states, (B, Hv, Dv), or (B, Hv, 1).

    Attributes:
        q: of the scaled row of q.
        k: of the row of k.
        factor: the largest factor of the decay.
        growth: by which the delta rule multiplies an error at most.
        rounding: by which a decayed state is off, in proportion to its size.
        beta: its size, 1 without beta.
        v: the sizes of v.
    """

    q: Tensor
    k: Tensor
    factor: Tensor
    growth: Tensor
    rounding: Tensor
    beta: Tensor
    v: Tensor


class _Forward(NamedTuple):
    """The sizes and errors of a state at a position, by column: (B, Hv, Dv).

    Attributes:
        decayed: the size of the decayed state.
        of_decayed: its error.
        size: the size of the state after the position.
        error: its error.
        of_u: the error of u.
        u: its size.
    """

    decayed: Tensor
    of_decayed: Tensor
    size: Tensor
    error: Tensor
    of_u: Tensor
    u: Tensor


class _Call:
    """A call in float64, with numbers that are not finite as 0.

    Attributes:
        inputs: the numbers of each position.
        packed: the sequences, or None.
        steps: the states at each position.
        forward: their errors.
        absolute: the error of a product, in proportion to its size.
        scale: the size of the scale of q.
        open: True for a sequence and value head with a number that is not finite, (B or N, Hv).
        end: the sizes and errors after the last position, (B or N, Hv, Dv).
    """

    def __init__(
        self,
        absolute: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        beta: Tensor | None,
        scale: float | None,
        normalize: bool,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        *grads: Tensor,
    ) -> None:
        given = (q, k, v, decay, beta, initial_state)
        dtypes = [each.dtype for each in given if each is not None]
        self.absolute = max(absolute, *(TOLERANCE[dtype].absolute for dtype in dtypes[:3]))
        wide = arithmetic(*given)
        self.absolute = absolute if wide is torch.float64 else max(self.absolute, TOLERANCE[wide].absolute)
        self.unit = torch.finfo(wide).eps / 2
        self.limit = torch.finfo(wide).max / 4
        self.scale = abs(formulas.scale_of(q, scale))
        self.packed = None if cu_seqlens is None else formulas.packed_of(cu_seqlens, q.shape[1])
        self.open = self._open(q, k, v, decay, beta, initial_state, *grads)
        safe = [None if each is None else _finite(each) for each in given]
        q, k, v = (each for each in safe[:3] if each is not None)
        if decay is not None:
            decay = decay.double().nan_to_num(nan=0.0, posinf=0.0, neginf=-1e3)  # whose exponential is 0
        self.inputs = formulas.prepare_inputs(q, k, v, decay, safe[4], scale, normalize, safe[5], cu_seqlens)
        if decay is not None and not decay.numel():  # of keys without elements
            decay = None
        self.sizes = _sizes(self.inputs, decay, self.unit)
        if q.shape[1]:
            self.open = self.open | self.by_sequence(self._overflows(decay, *grads[:1]))
        self.steps: list[formulas.Step] = []
        self.forward: list[_Forward] = []
        self._run()

    def _open(self, *given: Tensor | None) -> Tensor:
        """Return the heads whose results are open, as a kernel may multiply a number that is not finite by 0."""
        q, k, v, decay, beta, state, *grads = given
        assert q is not None
        assert k is not None
        assert v is not None
        heads, group = v.shape[2], v.shape[2] // max(q.shape[2], 1)
        # a kernel may have the squares of q and k, to normalize them, and products of two keys
        rows = ~(k.double().square().sum(-1) < self.limit) | (_finite(q).square().sum(-1) >= self.limit)
        if grads:
            rows = rows | ~q.isfinite().all(-1)
        rows = rows.repeat_interleave(max(group, 1), 2)[:, :, :heads] | ~v.isfinite().all(-1)
        if decay is not None:
            wrong = decay.isnan() | (decay == math.inf)
            rows = rows | (wrong if wrong.dim() == 3 else wrong.any(-1))
        if beta is not None:
            rows = rows | ~beta.isfinite()
        if grads:
            assert grads[0] is not None
            rows = rows | ~grads[0].isfinite().all(-1)
        by_state = self.by_sequence(rows)
        for each in (state, *grads[1:]):
            if each is not None:
                by_state = by_state | ~each.isfinite().flatten(2).all(-1)
        return by_state

    def _overflows(self, decay: Tensor | None, *grad: Tensor) -> Tensor:
        """Return the positions, (B, S, Hv), of a product that may overflow before it meets a small number."""
        q, k = self.sizes.q[..., 0], self.sizes.k[..., 0]
        # a chunk has the products of each q and k, and of the gradient of each position and each v
        pairs = [(q, k), *((_norm(_finite(g), -1), _norm(self.sizes.v, -1)) for g in grad)]
        found = torch.stack([~(one * other.amax(1, keepdim=True) < self.limit) for one, other in pairs]).any(0)
        if self.inputs.beta is not None:
            found = found | (self.sizes.beta * self.sizes.v >= self.limit).any(-1)
            # the inverse of a chunk has the products of what the positions multiply by
            found = found | (_span(self.sizes.growth.log())[..., 0] >= math.log(self.limit))
        if decay is not None:
            largest = q.maximum(k).amax(1, keepdim=True).clamp(min=1.0)
            found = found | (_span(decay.clamp(min=0.0))[..., 0] + largest.log() >= math.log(self.limit))
        return found

    def by_sequence(self, rows: Tensor) -> Tensor:
        """Return True for each sequence with a True at one of its positions, (B or N, Hv), from (B, S, Hv)."""
        if self.packed is None:
            return rows.any(1)
        own = (self.packed.number == torch.arange(len(self.packed.first))[:, None]) & self.packed.inside
        return (own[..., None] & rows).any(1)

    def opened(self, bound: Tensor, states: bool = False) -> Tensor:
        """Return bounds by position, (B, S, H, ...), or of states, with inf for open heads and for NaN.

        Of key heads, those of which a value head is open.
        """
        is_open = self.open
        heads = bound.shape[1 if states else 2]
        if heads != is_open.shape[1]:
            is_open = is_open.reshape(len(is_open), heads, is_open.shape[1] // max(heads, 1)).any(-1)
        if not states:
            if self.packed is None:
                is_open = is_open[:, None]
            else:
                is_open = is_open.index_select(0, self.packed.number)[None] & self.packed.inside[:, None]
        is_open = is_open.reshape(*is_open.shape, *(1,) * (bound.dim() - is_open.dim()))
        return bound.masked_fill(is_open | ~(bound < self.limit), math.inf)

    def _run(self) -> None:
        """Compute the states and their errors, one position after another."""
        inputs, packed, z = self.inputs, self.packed, self.sizes
        first = _norm(inputs.state)
        state, size = inputs.state[:1] if packed else inputs.state, first[:1] if packed else first
        drift, spread = torch.zeros_like(size), torch.zeros_like(size)
        ends: tuple[list[Tensor], list[Tensor]] = ([], [])
        for t in range(inputs.q.shape[1]):
            if packed is not None:
                begins, own = packed.begins[t], packed.number[t : t + 1]
                size = torch.where(begins, first.index_select(0, own), size)
                drift = drift.masked_fill(begins, 0.0)
                spread = spread.masked_fill(begins, 0.0)
            at = formulas.step(inputs, t, formulas.state_before(inputs, t, state, packed))
            state, u, k = at.state, at.u.abs(), z.k[:, t]
            decayed = z.factor[:, t] * size
            drift = z.factor[:, t] * drift + z.rounding[:, t] * decayed
            spread = z.factor[:, t].square() * spread
            of_decayed = drift + spread.sqrt()
            of_v = self.absolute * (at.difference.abs() + k * decayed) if inputs.beta is not None else 0.0 * u
            local = z.beta[:, t] * of_v + self.absolute * u
            of_u = z.beta[:, t] * (of_v + k * of_decayed) * (inputs.beta is not None)
            growth = z.growth[:, t]
            size = _size(decayed, k * u, state)
            drift = growth * drift + self.unit * size
            spread = growth.square() * spread + (k * local).square()
            error = drift + spread.sqrt() + self.absolute * size
            self.steps.append(at)
            self.forward.append(_Forward(decayed, of_decayed + self.absolute * decayed, size, error, of_u, u))
            ends[0].append(size)
            ends[1].append(error)
        if ends[0]:  # what overflows may reach the positions before it, multiplied by 0
            overflows = (torch.stack(ends[0], 1) < self.limit).logical_not().any(-1)
            self.open = self.open | self.by_sequence(overflows)
        self.end = [self._after(*each) for each in zip(ends, (first, torch.zeros_like(first)))]

    def _after(self, each: list[Tensor], before: Tensor) -> Tensor:
        """Return the numbers after the last position, from those of each position, and those before the first."""
        if not each:
            return before
        if self.packed is None:
            return each[-1]
        after = torch.cat(each).index_select(0, self.packed.last)
        return torch.where(self.packed.empty[:, None, None], before, after)


def _size(before: Tensor, term: Tensor, state: Tensor) -> Tensor:
    """Return the sizes of a state's columns from those before a term was added, (B, Hv, Dv)."""
    return torch.maximum((before.square() + term.square()).sqrt(), _norm(state))


def _norm(x: Tensor, dim: int = -2, *, keepdim: bool = False) -> Tensor:
    """Return the norms of the columns of states, or along another dim."""
    return x.square().sum(dim, keepdim=keepdim).sqrt()


def _finite(tensor: Tensor) -> Tensor:
    return tensor.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _sizes(inputs: Inputs, decay: Tensor | None, unit: float) -> _Sizes:
    """Return the sizes at each position; ``decay`` without numbers that are not finite."""
    q, k = (_norm(each, -1, keepdim=True) for each in (inputs.q, inputs.k))
    ones = torch.ones_like(k)
    beta = ones if inputs.beta is None else inputs.beta.abs()
    growth = ones if inputs.beta is None else (1 - inputs.beta * k.square()).abs().clamp(min=1.0)
    if decay is None:
        return _Sizes(q, k, ones, growth, unit * ones, beta, inputs.v.abs())
    deepest = decay.abs().clamp(max=_DEEPEST)
    deepest, span = (deepest if decay.dim() == 4 else deepest[..., None]).amax(-1, keepdim=True), _span(deepest)
    assert inputs.factor is not None
    factor = inputs.factor.amax(-2)
    return _Sizes(q, k, factor, growth, unit * (2 + deepest + span), beta, inputs.v.abs())


def _span(decay: Tensor) -> Tensor:
    """Return the sums of sizes of decays over the last positions up to each one, (B, S, Hv, 1): of the largest row."""
    largest = (decay if decay.dim() == 4 else decay[..., None]).amax(-1, keepdim=True)
    padded = torch.nn.functional.pad(largest.cumsum(1), (0, 0, 0, 0, _SPAN, 0))
    return padded[:, _SPAN:] - padded[:, : largest.shape[1]]


def error_bound(absolute: float, a: LinearAttentionArgs) -> tuple[Tensor, Tensor]:
    """Return the largest errors of out, (B, S, Hv, Dv), and of the state, (B or N, Hv, Dk, Dv)."""
    call = _Call(absolute, a.q, a.k, a.v, a.decay, a.beta, a.scale, a.normalize, a.initial_state, a.cu_seqlens)
    size, error = call.end
    of_end = call.opened(error + call.absolute * size, states=True)
    of_state = of_end.unsqueeze(-2).expand(*of_end.shape[:2], a.q.shape[3], a.v.shape[3])
    if not call.forward:
        return a.v.double().new_zeros(a.v.shape), of_state
    q = call.sizes.q
    sizes = torch.stack([q[:, t] * each.size for t, each in enumerate(call.forward)], 1)
    bounds = torch.stack([q[:, t] * each.error for t, each in enumerate(call.forward)], 1)
    out = call.opened(bounds.masked_fill(~(sizes < call.limit), math.inf))  # a part of the sum may overflow
    group = a.v.shape[2] // max(a.q.shape[2], 1)
    unknown = ~a.q.isfinite().all(-1, keepdim=True).repeat_interleave(max(group, 1), 2)[:, :, : a.v.shape[2]]
    return out.masked_fill(unknown, math.inf), of_state


def gradient_error_bound(absolute: float, a: LinearAttentionGradArgs) -> tuple[Tensor, ...]:
    """Return the largest errors of the gradients of q, k, v, decay, beta and initial_state."""
    of_end = a.grad_state if a.return_state else torch.zeros_like(a.grad_state)
    call = _Call(
        absolute,
        a.q,
        a.k,
        a.v,
        a.decay,
        a.beta,
        a.scale,
        a.normalize,
        a.initial_state,
        a.cu_seqlens,
        a.grad_out,
        of_end,
    )
    g, end = _finite(a.grad_out), _finite(of_end)
    first = call.absolute * _norm(end)
    if not call.forward:
        zeros = [torch.zeros((), dtype=torch.float64)] * 5
        return (*zeros, call.opened(first, states=True)[:, :, None])
    dq, dk, dv, ddecay, dbeta, start = (torch.stack(each, 1) for each in _gradients(call, g, end))
    if call.packed is not None:
        before = start[0].index_select(0, call.packed.first)
        start_bound = torch.where(call.packed.empty[:, None, None], first, before)
    else:
        start_bound = start[:, 0]
    dq = _of_key_heads(dq * call.scale, a.q, a.normalize)
    dk = _of_key_heads(dk, a.k, a.normalize)
    ddecay = ddecay if a.decay is None or a.decay.dim() == 3 else ddecay.unsqueeze(-1)
    positions = [call.opened(each) for each in (dq.unsqueeze(-1), dk.unsqueeze(-1), dv, ddecay, dbeta)]
    return (*positions, call.opened(start_bound, states=True).unsqueeze(-2))


def _of_key_heads(bound: Tensor, x: Tensor, normalize: bool) -> Tensor:
    """Return the errors of the gradient of q or k, (B, S, Hk), from those of its normalized rows, (B, S, Hv)."""
    group = bound.shape[2] // max(x.shape[2], 1)
    summed = bound.reshape(*bound.shape[:2], x.shape[2], group).sum(-1)
    return 1.5 * summed * formulas.rnorm_of(_finite(x))[..., 0] if normalize else summed


def _gradients(call: _Call, g: Tensor, end: Tensor) -> list[list[Tensor]]:
    """Return the errors at each position: of q, k, decay and beta (B, Hv), of v and the state before it (B, Hv, Dv)."""
    inputs, packed, z, absolute = call.inputs, call.packed, call.sizes, call.absolute
    parts: list[list[Tensor]] = [[], [], [], [], [], []]
    of_state, ends = (end[:1] if packed else end), _norm(end)
    size = ends[:1] if packed else ends
    drift, spread = torch.zeros_like(size), (absolute * size).square()
    overflows: list[Tensor] = []
    later = size.new_zeros(size.shape[:-1])  # squared errors of the sums of the decays' gradients
    for t in reversed(range(len(call.steps))):
        at, f, k, q, grad = call.steps[t], call.forward[t], z.k[:, t], z.q[:, t], g[:, t]
        if packed is not None:
            own, is_end = packed.number[t : t + 1], packed.ends[t]
            of_state = torch.where(is_end, end.index_select(0, own), of_state)
            size = torch.where(is_end, ends.index_select(0, own), size)
            drift = drift.masked_fill(is_end, 0.0)
            spread = torch.where(is_end, (absolute * ends.index_select(0, own)).square(), spread)
            later = later.masked_fill(is_end, 0.0)
        of_state = of_state + inputs.q[:, t, :, :, None] * grad.unsqueeze(-2)
        size = _size(size, q * grad.abs(), of_state)
        spread = spread + (absolute * q * grad.abs()).square()
        drift = drift + call.unit * size
        error = drift + spread.sqrt()
        du, most = (inputs.k[:, t, :, :, None] * of_state).sum(-2), k * size
        of_du = k * error + absolute * most
        later = 0.98 * later + (_norm(q * f.size * grad.abs() + k * size * f.u, -1) * min(absolute, _SUMS)).square()
        of_q = _norm(f.error * grad.abs(), -1)
        of_k = _norm((error + absolute * size) * f.u + size * f.of_u, -1)
        of_v, growth, beta = of_du, z.growth[:, t], z.beta[:, t]
        if inputs.beta is not None:
            r = (beta * du).abs()
            of_v = beta * of_du
            of_k = of_k + _norm(f.of_decayed * r + f.decayed * of_v, -1)
            difference = at.difference.abs()
            of_difference = k * f.of_decayed + absolute * difference
            parts[4].append(_norm(of_du * difference + du.abs() * of_difference, -1))
            of_state = of_state - inputs.k[:, t, :, :, None] * (inputs.beta[:, t] * du).unsqueeze(-2)
            size = _size(size, k * r, of_state)
            spread = growth.square() * spread + (absolute * k * beta * most).square()
            drift = growth * drift + call.unit * size
            error = drift + spread.sqrt()
        else:
            parts[4].append(torch.zeros_like(of_k))
        of_decay = f.decayed * (error + absolute * size) + size * f.of_decayed
        parts[0].append(of_q)
        parts[1].append(of_k)
        parts[2].append(of_v)
        parts[3].append(_norm(of_decay, -1) + later.sqrt())
        if inputs.factor is not None:
            of_state = inputs.factor[:, t] * of_state
            size = z.factor[:, t] * size
            drift = z.factor[:, t] * drift + z.rounding[:, t] * size
            spread = z.factor[:, t].square() * spread
        parts[5].append(drift + spread.sqrt() + absolute * size)
        products = f.size * grad.abs() * max(1.0, call.scale), size * f.u  # in the gradients of q and k
        largest = torch.stack([size, most, *products]).amax(0)
        overflows.append((largest < call.limit).logical_not().any(-1))
    call.open = call.open | call.by_sequence(torch.stack(overflows[::-1], 1))
    return [each[::-1] for each in parts]

"""Wrong kernels of linear_attention, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from wrong_kernels import Run, wrong

from fusedops.ops.linear_attention.formulas import rnorm_of

OP = "linear_attention"


def merged(cu_seqlens: Tensor | None) -> Tensor | None:
    """Return the bounds with all positions in the first sequence."""
    if cu_seqlens is None:
        return None
    return torch.cat((cu_seqlens[:1], cu_seqlens[-1:].expand(len(cu_seqlens) - 1)))


def by_modulo(a: SimpleNamespace) -> dict[str, Tensor]:
    """Return q and k of which value head h gets head ``h % Hk``."""
    group = a.v.shape[2] // a.q.shape[2]
    return {name: getattr(a, name).repeat(1, 1, group, 1) for name in ("q", "k")}


@wrong("the state leaks into the next packed sequence", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(cu_seqlens=merged(a.cu_seqlens))


@wrong("the decay comes after the update", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.decay is None or a.decay.dim() == 4 else run(v=a.v * a.decay.exp()[..., None].to(a.v.dtype))


@wrong("value head h has the key head h modulo their number", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(**by_modulo(a))


@wrong("decays are differences of two sums", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.decay is None:
        return run()
    return run(decay=a.decay.cumsum(1).diff(dim=1, prepend=torch.zeros_like(a.decay[:, :1])))


@wrong("a decay of each row is their mean", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(decay=a.decay.mean(-1)) if a.decay is not None and a.decay.dim() == 4 else run()


@wrong("beta scales the value, and nothing is replaced", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.beta is None else run(v=a.v * a.beta[..., None].to(a.v.dtype), beta=None)


@wrong("q is not normalized", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if not a.normalize:
        return run()
    return run(normalize=False, k=(a.k.double() * rnorm_of(a.k.double())).to(a.k.dtype))


@wrong("the scale is always that of the rows", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(scale=None)


@wrong("the initial state is transposed", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    square = a.initial_state is not None and a.q.shape[3] == a.v.shape[3]
    return run(initial_state=a.initial_state.mT) if square else run()


@wrong("the state returned is that before the last position", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.cu_seqlens is not None or a.decay is None or not a.q.shape[1]:
        return run()
    last = torch.arange(a.q.shape[1]) == a.q.shape[1] - 1
    decay = a.decay.masked_fill(last.view(-1, *(1,) * (a.decay.dim() - 2)), 0.0)
    return run()[0], run(k=a.k.masked_fill(last[:, None, None], 0.0), decay=decay)[1]


@wrong("gradients leak into the packed sequence before", OP, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(cu_seqlens=merged(a.cu_seqlens))


@wrong("the gradient of the state is left out", OP, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(return_state=False)


@wrong("the gradient of a key head is that of its first value head", OP, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    group = a.v.shape[2] // a.q.shape[2]
    others = torch.arange(a.v.shape[2]) % group > 0
    of_first = run(
        grad_out=a.grad_out.masked_fill(others[:, None], 0.0),
        grad_state=a.grad_state.masked_fill(others[:, None, None], 0.0),
    )
    return (*of_first[:2], *run()[2:])


@wrong("the gradient of the decay is that of its exponential", OP, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dq, dk, dv, ddecay, *rest = run()
    return dq, dk, dv, None if ddecay is None else (ddecay / a.decay.clamp(min=-9).exp()).to(ddecay.dtype), *rest


@wrong("the gradient of the decay lacks the state before the first position", OP, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.initial_state is None:
        return run()
    return (*run()[:3], run(initial_state=torch.zeros_like(a.initial_state))[3], *run()[4:])


@wrong("the gradient of beta is that of its values", OP, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    *rest, dbeta, dstate = run()
    if dbeta is None:
        return (*rest, dbeta, dstate)
    # beta * dbeta is what a gradient of v sums to where nothing is subtracted
    return (*rest, (rest[2] * a.v).sum(-1).to(dbeta.dtype), dstate)


@wrong("the gradient of a normalized row keeps its direction", OP, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if not a.normalize:
        return run()
    rnorms = [rnorm_of(each.double()) for each in (a.q, a.k)]
    plain = run(q=a.q * rnorms[0], k=a.k * rnorms[1], normalize=False)
    along = [(each * rnorm).to(own.dtype) for each, rnorm, own in zip(plain, rnorms, (a.q, a.k))]
    return (*along, *run()[2:])


@wrong("the gradient of the initial state is not decayed", OP, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.initial_state is None or a.decay is None or a.cu_seqlens is not None or not a.q.shape[1]:
        return run()
    first = a.decay.clone()
    first[:, 0] = 0.0
    return (*run()[:5], run(decay=first)[5])

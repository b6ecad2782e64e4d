"""Wrong kernels of causal_conv1d, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from wrong_kernels import Run, wrong

CONV = "causal_conv1d"


@wrong("the convolution is shifted by one position, so that it sees the next one", CONV, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(x=torch.roll(a.x, -1, -1))[0], run()[1]


@wrong("the taps are in the opposite order", CONV, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(weight=a.weight.flip(1))


@wrong("the initial state is ignored", CONV, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(initial_state=None)


@wrong("the initial state is in the opposite order", CONV, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.initial_state is None else run(initial_state=a.initial_state.flip(-1))


@wrong("a packed sequence sees the end of the one before it", CONV, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.cu_seqlens is None:
        return run()
    y, state = run()
    ends = a.cu_seqlens[[0, -1]]
    before = None if a.initial_state is None else a.initial_state[:1]
    return run(cu_seqlens=ends, initial_state=before)[0].where(_inside(a), y), state


@wrong("every packed sequence has the initial state of the first one", CONV, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.cu_seqlens is None or a.initial_state is None:
        return run()
    return run(initial_state=a.initial_state[:1].expand_as(a.initial_state))


@wrong("positions of no sequence are a sequence of their own", CONV, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.cu_seqlens is None:
        return run()
    y, state = run()
    return y.where(_inside(a), run(cu_seqlens=None, initial_state=None)[0]), state


@wrong("the state lacks the inputs of the initial state after a short sequence", CONV, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run()[0], run(initial_state=None)[1]


@wrong("the state is one position old", CONV, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    y, state = run()
    if a.cu_seqlens is not None or a.x.shape[-1] == 0:
        return y, state
    return y, run(x=a.x[..., :-1])[1]


@wrong("the bias is added after the activation", CONV, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.bias is None:
        return run()
    y, state = run(bias=None)
    return y + a.bias[:, None].to(y.dtype), state


@wrong("the activation is left out", CONV, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(activation="none")


@wrong("the sum is rounded before the activation", CONV, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    y, state = run(activation="none")
    return (torch.nn.functional.silu(y) if a.activation == "silu" else y), state


@wrong("the gradient of x is shifted by one position", CONV, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, *others = run()
    return torch.roll(dx, 1, -1), *others


@wrong("the gradient reaches the packed sequence before", CONV, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.cu_seqlens is None:
        return run()
    before = None if a.initial_state is None else a.initial_state[:1]
    of_state = a.grad_state[:1] if a.return_state else a.grad_state
    return run(cu_seqlens=a.cu_seqlens[[0, -1]], initial_state=before, grad_state=of_state)[0], *run()[1:]


@wrong("the gradient lacks the slope of the activation", CONV, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(activation="none")


@wrong("the slope of the activation lacks the bias", CONV, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dweight, _, dinitial = run(bias=None)
    return dx, dweight, run()[2], dinitial


@wrong("the gradient of the state is ignored", CONV, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(grad_state=torch.zeros_like(a.grad_state))


@wrong("the gradient of weight lacks the inputs before the sequence", CONV, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, _, dbias, dinitial = run()
    return dx, run(initial_state=None)[1], dbias, dinitial


@wrong("the gradient of weight is that of the first batch", CONV, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, _, dbias, dinitial = run()
    if a.cu_seqlens is not None or not a.x.shape[0]:
        return dx, run()[1], dbias, dinitial
    before = None if a.initial_state is None else a.initial_state[:1]
    of_state = a.grad_state[:1] if a.return_state else a.grad_state
    return dx, run(x=a.x[:1], grad_y=a.grad_y[:1], initial_state=before, grad_state=of_state)[1], dbias, dinitial


@wrong("the gradient of the initial state lacks that of the state after a short sequence", CONV, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return *run()[:3], run(grad_state=torch.zeros_like(a.grad_state))[3]


def _inside(a: SimpleNamespace) -> torch.Tensor:
    """Return True for the positions of x that a packed sequence has."""
    position = torch.arange(a.x.shape[-1])
    return (position >= a.cu_seqlens[0]) & (position < a.cu_seqlens[-1])

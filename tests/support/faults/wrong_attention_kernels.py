"""Wrong kernels of attention, for the list in ``wrong_kernels``: faults that kernels of other libraries have had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from wrong_kernels import Run, wrong


@wrong("the diagonal starts at the upper left for every alignment", "attention", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(causal="upper_left") if a.causal == "lower_right" and a.window is None else run()


@wrong("the window is dropped", "attention", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(window=None)


@wrong("True in the mask is seen", "attention", "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.mask is None else run(mask=a.mask == 0)


@wrong("a fully masked row is the mean of the values", "attention", "forward", "masked_rows")
def _(run: Run, a: SimpleNamespace) -> Any:
    out, lse = run()
    mean = a.v.float().mean(2, keepdim=True).repeat_interleave(a.q.shape[1] // a.k.shape[1], 1).to(out.dtype)
    return torch.where((lse == -torch.inf)[..., None], mean, out), lse


@wrong("query heads take turns in the key heads", "attention", "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    group = a.q.shape[1] // a.k.shape[1]
    return run(**{name: getattr(a, name).repeat(1, group, 1, 1) for name in ("k", "v")})


@wrong("lse is of base 2", "attention", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    out, lse = run()
    return out, lse * 1.4426950408889634


@wrong("the diagonal starts at the upper left in backward", "attention", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(causal="upper_left") if a.causal == "lower_right" and a.window is None else run()


@wrong("the gradient of lse is left out", "attention", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(return_lse=False)


@wrong("the gradient of a key head is that of its first query head", "attention", "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    grads = a.grad_out.clone()
    heads = torch.arange(grads.shape[1]) % (grads.shape[1] // a.k.shape[1]) > 0
    grads[:, heads] = 0
    return run()[0], *run(grad_out=grads)[1:]

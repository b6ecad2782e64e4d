"""Wrong kernels of linear_cross_entropy, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from wrong_kernels import Run, wrong


@wrong("ignored rows count in the mean", "linear_cross_entropy", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.reduction != "mean" or a.denominator is not None:
        return run()
    return run(denominator=torch.full((1,), float(max(a.target.numel(), 1))))


@wrong("ignored rows have a loss", "linear_cross_entropy", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(target=a.target.masked_fill(a.target == a.ignore_index, 0))


@wrong("the last short chunk is dropped", "linear_cross_entropy", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    rows = a.target.numel()
    whole = rows if a.chunk is None or a.chunk > rows else rows // a.chunk * a.chunk
    flat = a.target.flatten().clone()
    flat[whole:] = a.ignore_index
    return run(target=flat.view(a.target.shape))


@wrong("the bias is dropped", "linear_cross_entropy", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.bias is None else (run(bias=torch.zeros_like(a.bias))[0], *run()[1:])


@wrong("the saved gradient of weight is of the first chunk", "linear_cross_entropy", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    results = run()
    if results[2] is None or not results[2].numel() or a.chunk is None:
        return results
    flat = a.target.flatten().clone()
    flat[a.chunk :] = a.ignore_index
    return *results[:2], run(target=flat.view(a.target.shape))[2], results[3]


@wrong("the gradient of the bias is dropped", "linear_cross_entropy", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dweight, dbias = run()
    return dx, dweight, None if dbias is None else torch.zeros_like(dbias)


@wrong("the gradients are not scaled by the incoming one", "linear_cross_entropy", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(grad=torch.ones_like(a.grad))


@wrong("the rows of none share one incoming gradient", "linear_cross_entropy", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.reduction != "none" or not a.grad.numel():
        return run()
    return run(grad=a.grad.mean().expand(a.grad.shape).contiguous())


@wrong("the softcap is left out of the gradient", "linear_cross_entropy", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(softcap=None, x_grad=None, weight_grad=None, bias_grad=None)

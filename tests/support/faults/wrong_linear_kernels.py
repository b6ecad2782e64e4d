"""Wrong kernels of linear, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from wrong_kernels import Run, wrong

OP = "linear"


@wrong("the terms after the last whole vector are dropped", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    whole = a.x.shape[-1] // 16 * 16
    return run(x=a.x[..., :whole], weight=a.weight[:, :whole]) if whole else run()


@wrong("the bias is added after the activation", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.bias is None else run(bias=None) + a.bias.to(a.x.dtype)


@wrong("GELU by erf is that by tanh", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(activation="gelu_tanh") if a.activation == "gelu" else run()


@wrong("the last row has the result of the one before", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    x = a.x.clone()
    if x.dim() > 1 and x.shape[-2] > 1:
        x[..., -1, :] = x[..., -2, :]
    return run(x=x)


@wrong("the products are those of bfloat16", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(weight=a.weight.to(torch.bfloat16).to(a.weight.dtype))


@wrong("the slope of the activation is left out", OP, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(activation=None)


@wrong("the gradient of the weight is without the first row", OP, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, _, dbias = run()
    grad = a.grad.clone()
    if grad.dim() > 1 and grad.numel():
        grad[..., 0, :] = 0
    return dx, run(grad=grad)[1], dbias


@wrong("the slope is that of the sum without the bias", OP, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.bias is None:
        return run()
    dx, dweight, _ = run(bias=torch.zeros_like(a.bias))
    return dx, dweight, run()[2]

"""Wrong kernels of the norms and the gated activations, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from wrong_kernels import Run, wrong


@wrong("the offset of the weight is ignored", "rms_norm", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(offset=0.0)


@wrong("the offset of the weight is ignored in backward", "rms_norm", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(offset=0.0)


@wrong("eps is added twice", "add_rms_norm", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(eps=2 * a.eps)


@wrong("the gradient of the sum is left out", "add_rms_norm", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(grad_s=torch.zeros_like(a.grad_s))


@wrong("the bias is dropped where there is no weight", "layer_norm", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(bias=None) if a.weight is None else run()


@wrong("the gradient of x is made without the weight", "layer_norm", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(weight=None)[0], *run()[1:]


@wrong("the norm is of x, not of the sum", "add_layer_norm", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(residual=torch.zeros_like(a.residual))[0], *run()[1:]


@wrong("the residual gets the gradient of the sum alone", "add_layer_norm", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dresidual, *rest = run()
    return dx, dresidual if dresidual is None else a.grad_s.to(a.residual_dtype, copy=True), *rest


@wrong("the gate is clamped from below too", "swiglu", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.limit is None else run(gate=a.gate.clamp(min=-a.limit))


@wrong("alpha is ignored in backward", "swiglu", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(alpha=1.0)


@wrong("interleaved pairs are read as halves", "geglu", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(interleaved=False)


@wrong("the exact form has the gradient of the tanh form", "geglu", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(approximate="tanh")

"""Wrong kernels of the norms, the gated activations and rotary_embedding, for the list in ``wrong_kernels``."""

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


@wrong("the sign of sin is swapped", "rotary_embedding", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(sin=-a.sin)


@wrong("pairs are read as halves", "rotary_embedding", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(interleaved=False)


@wrong("what does not rotate is left 0", "rotary_embedding", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    q, k = run()
    for x in (q, k):
        x[..., 2 * a.cos.shape[-1] :] = 0
    return q, k


@wrong("every batch has the angles of the first", "rotary_embedding", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(cos=a.cos[:1], sin=a.sin[:1]) if a.cos.dim() == 3 else run()


@wrong("backward rotates by the same angles", "rotary_embedding", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(sin=-a.sin)


@wrong("the gradient of k is that of the heads of q", "rotary_embedding", "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dq, dk = run()
    heads = -3 if a.seq_dim == -2 else -2
    same = dq is not None and dk is not None and dk.numel() and dk.shape[heads] <= dq.shape[heads]
    return dq, dq.narrow(heads, 0, dk.shape[heads]).contiguous() if same else dk


@wrong("the layout with the positions before the heads is ignored", "rotary_embedding", "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.seq_dim == -2:
        return run()
    few = a.q.shape[-2]  # heads, taken for positions
    return run(k=None, cos=a.cos[..., :few, :], sin=a.sin[..., :few, :], seq_dim=-2)[0], run()[1]

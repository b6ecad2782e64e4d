"""Wrong kernels of linear_log_probs, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from wrong_kernels import Run, wrong

_NONE = 2**62  # an ignore_index that no target is


@wrong("the temperature divides before the softcap", "linear_log_probs", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    bias = None if a.bias is None else a.bias / a.temperature
    return run(x=a.x / a.temperature, bias=bias, temperature=1.0)


@wrong("the temperature is dropped", "linear_log_probs", "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(temperature=1.0)


@wrong("an ignored row is not 0", "linear_log_probs", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    ignored = a.target == a.ignore_index
    return run(target=a.target.masked_fill(ignored, 0), ignore_index=_NONE)


@wrong("the last rows of a chunk are left out", "linear_log_probs", "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    logp, *others = run()
    flat = logp.clone().view(-1)
    flat[len(flat) // 8 * 8 :] = 0
    return flat.view(logp.shape), *others


@wrong("the entropy is in bits", "linear_log_probs", "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    logp, entropy, lse = run()
    return logp, entropy / torch.log(torch.tensor(2.0)), lse


@wrong("the entropy is of the logits before the temperature", "linear_log_probs", "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    logp, _, lse = run()
    return logp, run(temperature=1.0)[1], lse


@wrong("lse is of the logits before the softcap", "linear_log_probs", "forward", "saved")
def _(run: Run, a: SimpleNamespace) -> Any:
    return *run()[:2], run(softcap=None)[2]


@wrong("the entropy's gradient is dropped", "linear_log_probs", "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(return_entropy=False)


@wrong("the entropy's gradient has no entropy in it", "linear_log_probs", "backward", "needs")
def _(run: Run, a: SimpleNamespace) -> Any:
    # p * log(p) instead of p * (log(p) + entropy): as if p had an incoming gradient of its own
    of_p = run(grad_logp=a.grad_entropy * a.entropy, grad_entropy=torch.zeros_like(a.grad_entropy))
    return tuple(None if each is None else each - other for each, other in zip(run(), of_p))


@wrong("the temperature is not in the gradient", "linear_log_probs", "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return tuple(None if each is None else each * a.temperature for each in run())


@wrong("the slope of the softcap is left out", "linear_log_probs", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(softcap=None)


@wrong("an ignored row has a gradient", "linear_log_probs", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    ignored = a.target == a.ignore_index
    return run(target=a.target.masked_fill(ignored, 0), ignore_index=_NONE)


@wrong("each row has the first one's gradient", "linear_log_probs", "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if not a.grad_logp.numel():
        return run()
    first = a.grad_logp.flatten()[:1].expand(a.grad_logp.numel())
    return run(grad_logp=first.reshape(a.grad_logp.shape).contiguous())

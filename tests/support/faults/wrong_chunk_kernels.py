"""Wrong kernels of cross_entropy and linear_cross_entropy, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from wrong_kernels import Run, wrong

_NONE = 2**62  # an ignore_index that no target is


@wrong("ignored rows are counted", "cross_entropy", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(ignore_index=_NONE)


@wrong("the mean is over all rows", "cross_entropy", "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.reduction != "mean" or a.denominator is not None:
        return run()
    return run(denominator=torch.tensor([float(max(a.target.numel(), 1))]))


@wrong("label smoothing is dropped", "cross_entropy", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(label_smoothing=0.0)


@wrong("z-loss is weighted by the smoothing", "cross_entropy", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(z_loss=a.z_loss * (1 - a.label_smoothing))


@wrong("the denominator is ignored", "cross_entropy", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(denominator=None)


@wrong("the loss is rounded to the dtype of the logits", "cross_entropy", "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    loss, *saved = run()
    return loss.to(a.logits.dtype).to(loss.dtype), *saved


@wrong("lse is of the logits before the softcap", "cross_entropy", "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    _, lse, log_prob = run(softcap=None)
    return run()[0], lse, log_prob


@wrong("the gradient is not scaled by the gradient of the loss", "cross_entropy", "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(grad=torch.ones_like(a.grad))


@wrong("each row gets the gradient of the first", "cross_entropy", "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(grad=a.grad.flatten()[:1].expand(a.grad.numel()).view(a.grad.shape) if a.grad.numel() else a.grad)


@wrong("the gradient of ignored rows is not 0", "cross_entropy", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(ignore_index=_NONE)


@wrong("the gradient is without the slope of the softcap", "cross_entropy", "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.softcap is None:
        return run()
    capped = (torch.tanh(a.logits.double() / a.softcap) * a.softcap).to(a.lse.dtype)
    return run(logits=capped, softcap=None).to(a.logits.dtype)


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
    return *results[:2], run(target=flat.view(a.target.shape))[2], *results[3:]


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

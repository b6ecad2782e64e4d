"""Wrong kernels of the modulated norms, gated residuals and group_norm, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from wrong_kernels import Run, wrong

NORM, ADD, BOTH, GROUPS = "modulated_norm", "gated_add", "gated_add_modulated_norm", "group_norm"


def widened(tensor: Tensor) -> Tensor:
    return tensor.double()


def rolled(tensor: Tensor) -> Tensor:
    """Return what repeats over rows with that of the sample before; of one for all samples, itself."""
    return tensor.roll(1, 0).contiguous() if tensor.dim() == 3 else tensor


@wrong("the shift is added before the scale multiplies", NORM, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.shift is None:
        return run()
    y, *saved = run(shift=None)
    moved = widened(y) + widened(a.shift) * (widened(a.scale) + a.offset)
    return moved.to(y.dtype), *saved


@wrong("the offset is added twice", NORM, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(offset=2 * a.offset)


@wrong("the scale is that of the sample before", NORM, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(scale=rolled(a.scale))


@wrong("the scale multiplies before the weight and the bias", NORM, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.bias is None:
        return run()
    y, *saved = run(bias=None)
    return (widened(y) + widened(a.bias)).to(y.dtype), *saved


@wrong("RMSNorm subtracts the mean", NORM, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(kind="layer")


@wrong("the gradient of the scale is not multiplied by the weight", NORM, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, _, *others = run()
    return dx, run(weight=None)[1], *others


@wrong("the gradient of the shift is that of the last token", NORM, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dscale, dshift, *others = run()
    if dshift is None or dshift.shape[-2:-1] == a.x.shape[1:2]:
        return dx, dscale, dshift, *others
    last = torch.zeros_like(a.grad)
    last[:, -1:] = a.grad[:, -1:]
    return dx, dscale, run(grad=last)[2], *others


@wrong("the gate is that of the next sample", ADD, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(gate=rolled(a.gate))


@wrong("tanh is skipped", ADD, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(activation="none")


@wrong("the gradient of the gate has no slope of tanh", ADD, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dy, _ = run()
    return dy, run(activation="none")[1]


@wrong("the gradient of a gate for each token is that of its first column", ADD, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dy, dgate = run()
    if dgate is None or dgate.shape[-1] != 1 or a.y.shape[-1] == 1:
        return dy, dgate
    first = torch.zeros_like(a.grad)
    first[..., :1] = a.grad[..., :1]
    return dy, run(grad=first)[1]


@wrong("the norm is that of the residual without the gated sum", BOTH, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    _, s, _, _ = run()
    z, _, mean, rstd = run(y=torch.zeros_like(a.y))
    return z, s, mean, rstd


@wrong("tanh is skipped", BOTH, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(activation="none")


@wrong("the gradient of s itself is left out of that of y", BOTH, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    found = list(run())
    found[1] = run(grad_s=torch.zeros_like(a.grad_s))[1]
    return tuple(found)


@wrong("a group ends one channel too late", GROUPS, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    def moved(tensor: Tensor | None, by: int, dim: int) -> Tensor | None:
        return None if tensor is None else tensor.roll(by, dim).contiguous()

    y, mean, rstd = run(x=moved(a.x, -1, 1), weight=moved(a.weight, -1, 0), bias=moved(a.bias, -1, 0))
    return moved(y, 1, 1), mean, rstd


@wrong("the silu is skipped", GROUPS, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(activation="none")


@wrong("the gradient of x goes around the silu", GROUPS, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(activation="none")[0], *run()[1:]


@wrong("the gradient of the bias is that of the first sample", GROUPS, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dweight, _ = run()
    first = torch.zeros_like(a.grad)
    first[:1] = a.grad[:1]
    return dx, dweight, run(grad=first)[2]

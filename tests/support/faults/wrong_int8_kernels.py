"""Wrong kernels of int8_linear, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from wrong_kernels import Run, wrong

from fusedops.quantization import rounded_rows

OP = "int8_linear"


def rows_of(a: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Return the rows of x in integers and their scales, as a right kernel has them."""
    return rounded_rows(a.x, a.x_scale, a.smooth) if a.x.is_floating_point() else (a.x, a.x_scale)


def unrounded(a: SimpleNamespace) -> Tensor | None:
    """Return x divided by its scales; None for an x of integers."""
    if not a.x.is_floating_point():
        return None
    x = a.x.float() if a.smooth is None else a.x.float() / a.smooth.float()
    return (x / rows_of(a)[1][..., None]).nan_to_num()


def of_integers(run: Run, a: SimpleNamespace, q: Tensor, scale: Tensor) -> Tensor:
    """Run the right kernel with other integers or scales."""
    y = run(x=q.clamp(-128, 127).to(torch.int8), x_scale=scale, smooth=None)
    return y.to(a.x.dtype) if a.dtype is None and a.x.is_floating_point() else y


@wrong("a row has the scale of the one before", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    q, scale = rows_of(a)
    return of_integers(run, a, q, scale.flatten().roll(1).view(scale.shape))


@wrong("an output has the scale of the one before", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(weight_scale=a.weight_scale.roll(1))


@wrong("the offset of 128 of a product without a sign is not corrected", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    q, scale = rows_of(a)
    missing = 128.0 * q.sum(-1, keepdim=True) * scale[..., None] * a.weight_scale
    return run() + missing.to(torch.float32)


@wrong("x is truncated, not rounded", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if (v := unrounded(a)) is None else of_integers(run, a, v.clamp(-127, 127).trunc(), rows_of(a)[1])


@wrong("halves are rounded away from 0", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if (v := unrounded(a)) is None:
        return run()
    return of_integers(run, a, (v.clamp(-127, 127).abs() + 0.5).floor() * v.sign(), rows_of(a)[1])


@wrong("the least integer is -128", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if (v := unrounded(a)) is None else of_integers(run, a, v.round(), rows_of(a)[1])


@wrong("smooth divides nothing", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(smooth=None)


@wrong("the scales are multiplied before the sum", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    q, scale = rows_of(a)
    y = (q.double() @ a.weight.double().t()).float() * (scale[..., None] * a.weight_scale)
    return (y if a.bias is None else y + a.bias.float()).to(run().dtype)


@wrong("a row with NaN has the scale of its other numbers", OP, "forward", "special")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(x=a.x.nan_to_num(0.0, 0.0, 0.0)) if a.x.is_floating_point() else run()


@wrong("smooth divides nothing in the gradient of x", OP, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(smooth=None)


@wrong("the gradient of x has no scales of the weight", OP, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(weight_scale=torch.ones_like(a.weight_scale))

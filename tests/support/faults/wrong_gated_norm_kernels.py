"""Wrong kernels of gated_rms_norm, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from wrong_kernels import Run, wrong

from fusedops.dtypes import upcast
from fusedops.ops.gated import formulas

GATED = "gated_rms_norm"


@wrong("the gate multiplies before the norm instead of after it", GATED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(gate_first=True)


@wrong("the gate multiplies after the norm instead of before it", GATED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(gate_first=False)


@wrong("groups are ignored", GATED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    y, rstd = run(groups=1)
    return y, None if rstd is None else rstd.expand(*rstd.shape[:-1], a.groups).contiguous()


@wrong("every group has the weight of the first one", GATED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.weight is None:
        return run()
    return run(weight=a.weight[: a.weight.numel() // a.groups].repeat(a.groups))


@wrong("the offset is forgotten", GATED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(offset=0.0)


@wrong("the activation is always silu", GATED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(activation="silu")


@wrong("eps is added outside the root", GATED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(eps=a.eps**2)


@wrong("the gradient of the gate lacks the derivative of its activation", GATED, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dgate, dweight = run()
    if dgate is None:
        return dx, dgate, dweight
    _, slope = formulas.activated(upcast(a.gate), a.activation)
    return dx, (upcast(dgate) / slope).to(dgate.dtype), dweight


@wrong("the gradient of silu is that of sigmoid", GATED, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dgate, dweight = run()
    if dgate is None or a.activation != "silu":
        return dx, dgate, dweight
    slopes = [formulas.activated(upcast(a.gate), each)[1] for each in ("silu", "sigmoid")]
    return dx, (upcast(dgate) / slopes[0] * slopes[1]).to(dgate.dtype), dweight


@wrong("the gradient of x lacks the gate", GATED, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dgate, dweight = run()
    ones = torch.full_like(a.gate, 100.0)  # whose sigmoid is 1
    return (dx if a.gate_first else run(gate=ones, activation="sigmoid")[0]), dgate, dweight


@wrong("the gradient of x goes through the norm of the whole row", GATED, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(groups=1, rstd=a.rstd.mean(-1, keepdim=True)) if a.rstd.shape[-1] else run()


@wrong("the gradient lacks the offset", GATED, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(offset=0.0)


@wrong("the gradient of weight is that of a norm without a gate", GATED, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dgate, dweight = run()
    if dweight is None or a.gate_first:
        return dx, dgate, dweight
    ones = torch.full_like(a.gate, 100.0)
    return dx, dgate, run(gate=ones, activation="sigmoid")[2]


@wrong("groups share the gradient of weight of the first one", GATED, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dgate, dweight = run()
    if dweight is None:
        return dx, dgate, dweight
    return dx, dgate, dweight[: dweight.numel() // a.groups].repeat(a.groups)

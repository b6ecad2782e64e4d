"""Wrong kernels of merge_attention, for the list in ``wrong_kernels``."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from wrong_kernels import Run, wrong

MERGE = "merge_attention"


@wrong("lse is that of one part", MERGE, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    out, lse = run()
    return out, a.lse_a.to(lse.dtype)


@wrong("lse is the larger of both", MERGE, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    out, lse = run()
    return out, torch.maximum(a.lse_a, a.lse_b).to(lse.dtype)


@wrong("the weights are those of the other part", MERGE, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(lse_a=a.lse_b, lse_b=a.lse_a)


@wrong("the parts have equal weights", MERGE, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    out, lse = run()
    return ((a.out_a.double() + a.out_b.double()) / 2).to(out.dtype), lse


@wrong("lse is of base 2", MERGE, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    out, lse = run(lse_a=a.lse_a * math.log(2), lse_b=a.lse_b * math.log(2))
    return out, lse / math.log(2)


@wrong("two parts without a key are NaN", MERGE, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    out, lse = run()
    return torch.where((lse == -math.inf)[..., None], math.nan, out), lse


@wrong("a part without a key reaches the row by 0 * NaN", MERGE, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    out, lse = run()
    return out + (0 * a.out_a).to(out.dtype), lse


@wrong("exponentials are not shifted by the larger lse", MERGE, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    out, lse = run()
    sums = torch.exp(a.lse_a.half()) + torch.exp(a.lse_b.half())  # as a kernel that has less range
    return torch.where((sums.isinf() & lse.isfinite())[..., None], math.nan, out), lse


@wrong("the gradient of a part is that of out", MERGE, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dout_a, dlse_a, *rest = run()
    return (None if dout_a is None else a.grad_out.to(dout_a.dtype)), dlse_a, *rest


@wrong("the gradient of lse is left out", MERGE, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(grad_lse=torch.zeros_like(a.grad_lse))


@wrong("the gradients of both lse lack that of out", MERGE, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dout_a, _, dout_b, _ = run()
    zeros = torch.zeros_like(a.grad_out)
    _, dlse_a, _, dlse_b = run(grad_out=zeros)
    return dout_a, dlse_a, dout_b, dlse_b


@wrong("the gradients of both lse have one sign", MERGE, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dout_a, dlse_a, dout_b, dlse_b = run()
    if dlse_b is None:
        return dout_a, dlse_a, dout_b, dlse_b
    only_lse = run(grad_out=torch.zeros_like(a.grad_out))[3]
    return dout_a, dlse_a, dout_b, 2 * only_lse - dlse_b


@wrong("the gradients of two parts without a key are NaN", MERGE, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dout_a, dlse_a, dout_b, dlse_b = run()
    dead = (a.lse_a == -math.inf) & (a.lse_b == -math.inf)
    return dout_a, (None if dlse_a is None else dlse_a.masked_fill(dead, math.nan)), dout_b, dlse_b


@wrong("the gradient of a part without a key is that of out", MERGE, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dout_a, dlse_a, dout_b, dlse_b = run()
    if dout_b is None:
        return dout_a, dlse_a, dout_b, dlse_b
    none = (a.lse_b == -math.inf)[..., None]
    return dout_a, dlse_a, torch.where(none, a.grad_out.to(dout_b.dtype), dout_b), dlse_b

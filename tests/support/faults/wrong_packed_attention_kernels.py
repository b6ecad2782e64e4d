"""Wrong kernels of varlen_attention, for the list in ``wrong_kernels``: faults at the bounds of sequences."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from wrong_kernels import Run, wrong

PACKED = "varlen_attention"


def moved(bounds: Tensor | None, by: int, rows: int) -> Tensor | None:
    """Return bounds of which the inner ones are some rows later."""
    if bounds is None:
        return None
    later = bounds.clone()
    later[1:-1] += by
    return later.clamp(0, rows).cummax(0).values.to(bounds.dtype)


def one_sequence(bounds: Tensor | None) -> Tensor | None:
    """Return the bounds of one sequence, with the number of bounds."""
    if bounds is None:
        return None
    whole = bounds.clone()
    whole[1:] = bounds[-1:]
    return whole


@wrong("a sequence sees the others too", PACKED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    bounds = {name: one_sequence(getattr(a, name)) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return run(**bounds)


@wrong("the bounds of the keys are one key late", PACKED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    bounds = a.cu_seqlens_q if a.cu_seqlens_k is None else a.cu_seqlens_k
    return run(cu_seqlens_k=moved(bounds, 1, a.k.shape[0]))


@wrong("the keys have the bounds of the queries", PACKED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(cu_seqlens_k=a.cu_seqlens_q.clamp(max=a.k.shape[0]))


@wrong("the diagonal starts at the upper left where lengths differ", PACKED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(causal="upper_left") if a.causal == "lower_right" else run()


@wrong("the window is one key short at the end of a sequence", PACKED, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.window is None or not a.window[1]:
        return run()
    return run(window=(a.window[0], a.window[1] - 1))


@wrong("the window is dropped", PACKED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(window=None)


@wrong("a query of no sequence is the mean of all values", PACKED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    out, lse = run()
    mean = a.v.float().mean(0).repeat_interleave(a.q.shape[1] // max(a.k.shape[1], 1), 0).to(out.dtype)
    return torch.where((lse == -math.inf)[..., None], mean, out), lse


@wrong("lse of a query without keys is 0", PACKED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    out, lse = run()
    return out, lse.masked_fill(lse == -math.inf, 0.0)


@wrong("lse is transposed as kernels have it", PACKED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    out, lse = run()
    return out, lse.transpose(0, 1).reshape(lse.shape)


@wrong("gradients cross the bounds of sequences", PACKED, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    bounds = {name: one_sequence(getattr(a, name)) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return run(**bounds)


@wrong("the gradient of the last key of a sequence is left out", PACKED, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    dq, dk, dv = run()
    ends = (a.cu_seqlens_q if a.cu_seqlens_k is None else a.cu_seqlens_k)[1:].long() - 1
    for each in (dk, dv):
        if each is not None and each.numel():
            each[ends.clamp(min=0)] = 0
    return dq, dk, dv


@wrong("the gradient of lse is left out", PACKED, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(return_lse=False)


@wrong("the diagonal starts at the upper left in backward", PACKED, "backward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(causal="upper_left") if a.causal == "lower_right" else run()


@wrong("the lengths are passed without the last", PACKED, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    bounds = {name: getattr(a, name) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return run(**{name: None if each is None else torch.cat((each[:-1], each[-2:-1])) for name, each in bounds.items()})

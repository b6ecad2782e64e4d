"""Wrong kernels of store_kv, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from wrong_kernels import Run, wrong

OP = "store_kv"


def _is_read(scale: torch.Tensor | None) -> bool:
    return scale is not None and scale.dim() < 3


@wrong("a token without a slot is written to the first one", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(slots=a.slots.clamp(min=0))


@wrong("a token is written one slot later", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    count = max(a.k_cache.shape[0] * a.k_cache.shape[1], 1)
    return run(slots=torch.where(a.slots < 0, a.slots, (a.slots + 1) % count))


@wrong("the scale of the next head is read", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(k_scale=a.k_scale.roll(1, -1)) if _is_read(a.k_scale) else run()


@wrong("the scale of the next page is read", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(v_scale=a.v_scale.roll(1, 0)) if _is_read(a.v_scale) and a.v_scale.dim() == 2 else run()


@wrong("a scale of a token is not written", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.v_scale is None or a.v_scale.dim() < 3 else run(v_scale=a.v_scale.clone())


@wrong("codes are rounded down", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.k_cache.dtype != torch.int8 or not _is_read(a.k_scale) or a.k_scale.dim() > 1:
        return run()
    return run(k=(a.k / a.k_scale[:, None]).floor() * a.k_scale[:, None])


@wrong("the codes of int8 reach -128", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    results = run()
    if a.k_cache.dtype == torch.int8 and _is_read(a.k_scale):
        a.k_cache[a.k_cache == -127] = -128
    return results


@wrong("the last token is not written", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    slots = a.slots.clone()
    slots[-1:] = -1
    return run(slots=slots)


@wrong("the values are written only where the keys are as wide", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.k.shape == a.v.shape else run(v_cache=a.v_cache.clone())

"""Wrong kernels of paged_attention, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from wrong_kernels import Run, wrong

OP = "paged_attention"


@wrong("a sequence has the pages after its own", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(block_table=(a.block_table + 1) % max(a.k.shape[0], 1))


@wrong("a sequence has the table of the next one", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(block_table=a.block_table.roll(1, 0))


@wrong("one key past those that are used is read", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    most = a.block_table.shape[1] * a.k.shape[1]
    return run(seqused_k=(a.seqused_k + (a.seqused_k > 0)).clamp(max=most))


@wrong("a key has the scale of the next head", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.k_scale is None else run(k_scale=a.k_scale.roll(1, 2))


@wrong("a value has the scale of the next token", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.v_scale is None else run(v_scale=a.v_scale.roll(1, 1))


@wrong("scales of pages are those of the first page", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.k_scale is None else run(k_scale=a.k_scale[:1].expand(a.k_scale.shape))


@wrong("codes have no sign", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(v=a.v.abs()) if a.v.dtype == torch.int8 else run()


@wrong("the last page is read from the one before", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    table = a.block_table.clone()
    if table.shape[1] > 1:
        table[:, -1] = table[:, -2]
    return run(block_table=table)

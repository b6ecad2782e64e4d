"""The launches of linear_log_probs for a case, which ``triton_aot.py`` records and compiles."""

from __future__ import annotations

from typing import Any

import torch


def launch_log_probs(case: dict[str, Any]) -> None:
    """Launch the kernel of linear_log_probs, or of its backward. op: "linear_log_probs", or with " backward"; shape of
    the logits, dtype, target, and maybe options (False: neither bias nor softcap nor entropy).
    """
    from fusedops_triton.losses import _linear_log_probs
    from fusedops_triton.losses._linear_cross_entropy import Chunk

    (rows, classes), dtype = case["shape"], getattr(torch, case["dtype"])
    padded, full = -(-classes // 16) * 16, case.get("options", True)
    logits = torch.empty((rows, padded), dtype=dtype, device="meta")[:, :classes]
    target, sums = torch.empty(rows, dtype=torch.int64, device="meta"), torch.empty(rows, device="meta")
    bias = torch.empty(padded, device="meta") if full else None
    chunk = Chunk(slice(0, rows), logits, padded, target, bias)
    options = _linear_log_probs.Options(0.7, 30.0 if full else None, -100, full)
    if "backward" in case["op"]:
        _linear_log_probs.gradients(chunk, sums, sums, sums, sums, options)
    else:
        _linear_log_probs.statistics(chunk, sums, sums if full else None, sums, options)

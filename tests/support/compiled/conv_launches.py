"""The launches of causal_conv1d for a case, which ``triton_aot.py`` records and compiles."""

from __future__ import annotations

from typing import Any

import torch


def launch_conv(case: dict[str, Any]) -> None:
    """Launch causal_conv1d, or its backward. op: it, or with " backward"; shape (B, C, S), dtype, and maybe width,
    by_channel, packed (sequences), states, silu, sums (False: the gradient of x alone).
    """
    from fusedops_triton.convolution import _causal_conv, _causal_conv_backward

    batch, channels, positions = case["shape"]
    dtype, width = getattr(torch, case["dtype"]), case.get("width", 4)
    x = torch.empty(batch, channels, positions, dtype=dtype, device="meta")
    x = torch.empty(batch, positions, channels, dtype=dtype, device="meta").mT if case.get("by_channel") else x
    weight, bias = x.new_empty(channels, width), x.new_empty(channels)
    sequences = case.get("packed")
    bounds = None if sequences is None else torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    states = x.new_empty(sequences or batch, channels, width - 1) if case.get("states") else None
    activation = "silu" if case.get("silu", True) else "none"
    if case["op"].endswith("backward"):
        sums = case.get("sums", True)
        needs = (True, sums, sums, states is not None)
        _causal_conv_backward.conv_backward(x, states, x, weight, bias, states, bounds, activation, needs)
    else:
        _causal_conv.conv_forward(x, weight, bias, activation, states, False, bounds)

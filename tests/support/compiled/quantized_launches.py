"""The launches of quantized_linear that ``triton_aot.py`` compiles."""

from __future__ import annotations

from typing import Any

import torch


def launch_quantized(case: dict[str, Any]) -> None:
    """Make the launches of a case. op: "quantized_linear", or with " backward"; shape (rows, K, N), format, dtype."""
    from fusedops.quantization import bytes_of_row
    from fusedops_triton.quantized import _quantized

    (rows, columns, outputs), dtype = case["shape"], getattr(torch, case["dtype"])
    x = torch.empty(rows, columns, dtype=dtype, device="meta")
    packed = torch.empty(outputs, bytes_of_row(columns, case["format"]) or 0, dtype=torch.uint8, device="meta")
    bias = torch.empty(outputs, dtype=dtype, device="meta")
    if case["op"].endswith("backward"):
        _quantized.linear_backward(x.new_empty(rows, outputs), packed, bias, case["format"], (True, False))
    else:
        _quantized.linear_forward(x, packed, bias, case["format"])

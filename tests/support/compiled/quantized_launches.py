"""The launches of quantized_linear and int8_linear that ``triton_aot.py`` compiles."""

from __future__ import annotations

from typing import Any

import torch


def launch_int8(case: dict[str, Any]) -> None:
    """Make the launch of a case. op: "int8_linear"; shape (rows, K, N), dtype."""
    from fusedops.ops.quantized.int8_linear import Int8LinearArgs
    from fusedops_triton.quantized import _int8

    rows, columns, outputs = case["shape"]
    q, weight = (torch.empty(each, columns, dtype=torch.int8, device="meta") for each in (rows, outputs))
    scales = (torch.empty(each, device="meta") for each in (rows, outputs))
    bias = torch.empty(outputs, dtype=getattr(torch, case["dtype"]), device="meta")
    _int8.int8_linear(Int8LinearArgs(q, next(scales), weight, next(scales), bias, dtype=case["dtype"]))


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

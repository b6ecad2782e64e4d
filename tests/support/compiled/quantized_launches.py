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
    from fusedops.ops.quantized.quantized_linear import QuantizedLinearArgs, QuantizedLinearGradArgs
    from fusedops.quantization import SCALED, bytes_of_row
    from fusedops_triton.quantized import _quantized

    (rows, columns, outputs), dtype = case["shape"], getattr(torch, case["dtype"])
    x = torch.empty(rows, columns, dtype=dtype, device="meta")
    size = bytes_of_row(columns, case["format"]) or 0
    packed = torch.empty(outputs, size, dtype=torch.uint8, device="meta")
    bias = torch.empty(outputs, dtype=dtype, device="meta")
    parts: tuple[Any, ...] = (None, None, None)
    if (data := SCALED.get(case["format"])) is not None:
        groups = data.scales_shape(outputs, columns, columns // 128)
        scales = torch.empty(groups, dtype=torch.uint8 if torch.uint8 in data.scales else torch.float16, device="meta")
        divisor = torch.empty((), device="meta") if data.global_scale else None
        parts = (scales, divisor, scales.to(torch.uint8) if data.zeros else None)
    if case["op"].endswith("backward"):
        grad, needs = x.new_empty(rows, outputs), (True, False)
        args = QuantizedLinearGradArgs(grad, packed, bias, case["format"], *parts, x_dtype=dtype, needs=needs)
        _quantized.quantized_linear_backward(args)
    else:
        _quantized.quantized_linear(QuantizedLinearArgs(x, packed, bias, case["format"], *parts))

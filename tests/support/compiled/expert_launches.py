"""The launches of experts that ``triton_aot.py`` compiles."""

from __future__ import annotations

from typing import Any

import torch

_NO_LORA = (None, None, None, None, 1.0)


def launch_experts(case: dict[str, Any]) -> None:
    """Make the launches of a case. op: "experts", "experts few" (without saved values), "experts activation" (of what
    torch has multiplied), "experts backward", "experts clear" or "experts alone", which is the up-projection by
    grouped_matmul; shape (T, E, K, H, I), dtype, and maybe activation, interleaved, transposed, bias.
    """
    from fusedops.ops.experts.arguments import ExpertsArgs, ExpertsGradArgs
    from fusedops.ops.experts.formulas import Activation
    from fusedops_triton.experts import _expert_activation, _expert_rows, _experts, _grouped_matmul

    (tokens, experts, choices, width, inner), dtype = case["shape"], getattr(torch, case["dtype"])
    transposed = case.get("transposed", False)

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    act = Activation(case.get("activation", "swiglu"), None, 1.0, 0.0, case.get("interleaved", False))
    outputs = 2 * inner if act.gated else inner
    up, down = (experts, outputs, width), (experts, width, inner)
    if transposed:
        up, down = (experts, width, outputs), (experts, inner, width)
    biases = (empty(experts, outputs), empty(experts, width)) if case.get("bias") else (None, None)
    x, index = empty(tokens, width), empty(tokens, choices, of=torch.int64)
    tensors = (x, index, empty(tokens, choices, of=torch.float32), empty(*up), empty(*down), *biases)
    if case["op"].endswith("clear"):
        _expert_rows.clear_empty(empty(*up), empty(experts, of=torch.int32))
    elif case["op"].endswith("activation"):
        of = _expert_rows.route(index, experts)
        _expert_activation.activation_forward(empty(tokens * choices, outputs), biases[0], of, act, True)
    elif case["op"].endswith("alone"):
        _grouped_matmul.products_forward(x, empty(*up), empty(experts, of=torch.int64), biases[0], transposed)
    elif case["op"].endswith("backward"):
        hidden = empty(tokens * choices, outputs)
        _experts.experts_backward(
            ExpertsGradArgs(x, *tensors, hidden, *act, transposed, *_NO_LORA, (True,) * 6 + (False,) * 4)
        )
    else:
        _experts.experts(ExpertsArgs(*tensors, *act, transposed, *_NO_LORA), not case["op"].endswith("few"))


def launch_packed_experts(case: dict[str, Any]) -> None:
    """Make the launch of a case: the products of rows with packed weights. op: "packed_experts", or with " gradient";
    shape (rows, E, N, K), format, dtype.
    """
    from fusedops.quantization import SCALED, bytes_of_row
    from fusedops_triton.experts._packed_rows import PackedRows
    from fusedops_triton.quantized._scaled import scaled

    def empty(*shape: int, of: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    (rows, experts, outputs, columns), gradient = case["shape"], case["op"].endswith("gradient")
    data = SCALED[case["format"]]
    groups = (experts, *data.scales_shape(outputs, columns, columns // 64))
    scales = empty(*groups, of=torch.uint8 if torch.uint8 in data.scales else torch.float16)
    divisor = empty(experts, of=torch.float32) if data.global_scale else None
    codes = empty(experts, outputs, bytes_of_row(columns, case["format"]) or 0)
    weight = scaled(codes, case["format"], scales, divisor, empty(*groups) if data.zeros else None)
    of_rows = empty(rows, outputs if gradient else columns, of=getattr(torch, case["dtype"]))
    PackedRows(weight).products(of_rows, empty(experts, of=torch.int32), not gradient)

"""swiglu on Ascend: torch_npu's op for packed halves. Two tensors are refused: to pack them costs more than it saves.

For elements of e bytes, the vendor's op moves 3 e, packing before it 4 e, and the unfused silu and product 5 e.
Source: torch_npu.npu_swiglu and npu_swiglu_backward: float16, bfloat16, float32, 1 to 8 dimensions, no empty tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops import Deviation, kernel, ops
from fusedops.constraints import DType, Present, Rank, Scalar
from fusedops_npu._row_order import NOT_PROMISED

_LIMITS = (
    Present("up", False, fix="pack gate and up into one matmul, and pass its result as gate"),
    DType("gate", torch.float16, torch.bfloat16, torch.float32),
    Rank("gate", *range(1, 9)),
    Scalar("interleaved", one_of=(False,)),
    Scalar("alpha", one_of=(1.0,)),
    Scalar("offset", one_of=(0.0,)),
    Present("limit", False),
)
_INFINITE = Deviation(
    "infinite-gate", "torch_npu does not document the result for a gate of -inf: it may be NaN, where the op gives 0"
)


@kernel(
    ops.swiglu,
    *_LIMITS,
    source="torch_npu.npu_swiglu",
    deviations=(_INFINITE,),
    rows_independent=NOT_PROMISED,
)
def swiglu(
    gate: Tensor, up: Tensor | None, limit: float | None, alpha: float, offset: float, interleaved: bool
) -> Tensor:
    """Compute the op for packed halves."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    if gate.numel() == 0:
        return ops.OPS["swiglu"].empty(gate, up)
    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    return vendor.npu_swiglu(gate.contiguous())


@kernel(
    ops.swiglu,
    *_LIMITS,
    direction="backward",
    source="torch_npu.npu_swiglu_backward",
    rows_independent=NOT_PROMISED,
)
def swiglu_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    limit: float | None,
    alpha: float,
    offset: float,
    interleaved: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradient of the packed tensor."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    if not needs[0]:
        return None, None
    if gate.numel() == 0:
        return torch.empty_like(gate, memory_format=torch.contiguous_format), None
    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    return vendor.npu_swiglu_backward(grad.contiguous(), gate.contiguous()), None

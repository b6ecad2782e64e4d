"""geglu on Ascend: torch_npu's op for packed halves. Two tensors are refused, as for swiglu.

By default the vendor's op takes the second half as the gate: ``activate_left=True`` is always passed. Its backward
needs gelu(gate), which is its forward's second result; to keep it would cost memory, so it is computed again.
Source: torch_npu.npu_geglu and npu_geglu_grad: float16, bfloat16, float32, 1 to 8 dimensions.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops import Adaptation, Deviation, kernel, ops
from fusedops.constraints import DType, Present, Rank, Scalar
from fusedops_npu._row_order import NOT_PROMISED

_LIMITS = (
    Present("up", False, fix="pack gate and up into one matmul, and pass its result as gate"),
    DType("gate", torch.float16, torch.bfloat16, torch.float32),
    Rank("gate", *range(1, 9)),
    Scalar("interleaved", one_of=(False,)),
)
_INFINITE = Deviation(
    "infinite-gate", "torch_npu does not document the result for a gate of -inf: it may be NaN, where the op gives 0"
)


def _again_cost(
    grad: Any, gate: Any, up: Any, approximate: str, interleaved: bool, needs: tuple[bool, ...]
) -> int | None:
    """Return the bytes of the vendor's two forward results."""
    return prod(gate.shape) * gate.dtype.itemsize


def _of_rounded_gelu(grad: Tensor, gate: Tensor, *_: Any) -> tuple[Tensor, None]:
    """Return what backward loses as it reads gelu(gate) rounded, in numbers below the normal ones: (..., 2H)."""
    info = torch.finfo(gate.dtype)
    return torch.cat((torch.zeros_like(grad), grad.abs()), -1).double() * (info.smallest_normal * info.eps / 2), None


@kernel(
    ops.geglu,
    *_LIMITS,
    source="torch_npu.npu_geglu",
    deviations=(_INFINITE,),
    rows_independent=NOT_PROMISED,
)
def geglu(gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool) -> Tensor:
    """Compute the op for packed halves."""
    if gate.numel() == 0:
        return ops.OPS["geglu"].empty(gate, up)
    return _vendor(gate, _code(approximate))[0]


@kernel(
    ops.geglu,
    *_LIMITS,
    direction="backward",
    source="torch_npu.npu_geglu_grad",
    adapts=(Adaptation("gelu", "gelu(gate), which the vendor's backward needs, is computed again", _again_cost),),
    rows_independent=NOT_PROMISED,
    extra_error=_of_rounded_gelu,
)
def geglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradient of the packed tensor."""
    if not needs[0]:
        return None, None
    if gate.numel() == 0:
        return torch.empty_like(gate, memory_format=torch.contiguous_format), None
    return _vendor_backward(grad.contiguous(), gate, _code(approximate)), None


def _code(approximate: str) -> int:
    """Return the vendor's number of a form: 1 is tanh, 0 is erf."""
    return int(approximate == "tanh")


def _vendor(packed: Tensor, code: int) -> tuple[Tensor, Tensor]:
    """Return the result, and gelu(gate)."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    return vendor.npu_geglu(packed.contiguous(), approximate=code, activate_left=True)


def _vendor_backward(grad: Tensor, packed: Tensor, code: int) -> Tensor:
    import torch_npu  # pyright: ignore[reportMissingImports]

    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    activated = _vendor(packed, code)[1]
    return vendor.npu_geglu_grad(grad, packed.contiguous(), activated, approximate=code, activate_left=True)

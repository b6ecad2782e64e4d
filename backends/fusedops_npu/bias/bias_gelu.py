"""bias_gelu on Ascend. The vendor has no op with a bias, so the bias is added first; then torch_npu's GELU is called.

``F.gelu`` cannot be used on this device: it ignores ``approximate`` and computes the tanh form. ``fast_gelu`` is quick
GELU. Source: torch_npu.npu_gelu and npu_gelu_backward, documented for at most 8 dimensions.
"""

from __future__ import annotations

from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from fusedops import Adaptation, kernel, ops
from fusedops.constraints import DType, Rank
from fusedops.dtypes import promoted
from fusedops_npu._row_order import NOT_PROMISED

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_RANKS = tuple(range(1, 9))


def _add_bias(x: Tensor, bias: Tensor | None) -> tuple[Tensor, torch.dtype]:
    """Return ``x + bias`` in float32, as the op requires, and the dtype of the op's result."""
    if bias is None:
        return x, x.dtype  # npu_gelu computes in float32 internally, and there is no sum to round
    return x.float() + bias.float(), promoted(x, bias)


def _sum_cost(x: Any, bias: Any, approximate: str) -> int | None:
    """Return the bytes of the float32 tensors: the sum, x if it is narrower, the vendor's result if it is cast."""
    if bias is None:
        return None
    casts = (x.dtype != torch.float32) + (promoted(x, bias) != torch.float32)
    return 4 * prod(x.shape) * (1 + casts)


def _backward_sum_cost(grad: Any, x: Any, bias: Any, approximate: str, needs: tuple[bool, ...]) -> int | None:
    return _sum_cost(x, bias, approximate)


_SUM_SENTENCE = "the vendor's op has no bias: x + bias is computed as a float32 tensor"


@kernel(
    ops.bias_gelu,
    DType("x", *_DTYPES),
    DType("bias", *_DTYPES),
    Rank("x", *_RANKS),
    source="torch_npu.npu_gelu",
    adapts=(Adaptation("sum", _SUM_SENTENCE, _sum_cost),),
    rows_independent=NOT_PROMISED,
)
def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Compute the tanh form or the exact form."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    u, dtype = _add_bias(x, bias)
    return cast("Tensor", torch_npu.npu_gelu(u.contiguous(), approximate=approximate)).to(dtype)  # pyright: ignore


@kernel(
    ops.bias_gelu,
    DType("x", *_DTYPES),
    DType("bias", *_DTYPES),
    Rank("x", *_RANKS),
    direction="backward",
    source="torch_npu.npu_gelu_backward",
    adapts=(Adaptation("sum", f"{_SUM_SENTENCE}, again", _backward_sum_cost),),
    rows_independent=NOT_PROMISED,
)
def bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and of the bias. The gradient of the bias is summed in float32."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    u, _ = _add_bias(x, bias)
    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    du: Tensor = vendor.npu_gelu_backward(grad.to(u.dtype).contiguous(), u.contiguous(), approximate=approximate)
    # a copy: the sum of a bias of x's own shape is du itself
    dbias = du.float().sum_to_size(bias.shape).to(bias.dtype, copy=True) if bias is not None and needs[1] else None
    return (du.to(x.dtype) if needs[0] else None), dbias

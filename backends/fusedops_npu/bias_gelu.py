"""bias_gelu on Ascend: the vendor has no op with a bias, so the sum comes first, then torch_npu's GELU.

Never ``F.gelu`` on this device: it ignores ``approximate`` and computes the tanh form; ``fast_gelu`` is quick GELU.
Source: torch_npu.npu_gelu and npu_gelu_backward, documented for at most 8 dimensions.
"""

from __future__ import annotations

from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from fusedops import Adaptation, kernel, ops
from fusedops.constraints import DType, Rank

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_RANKS = tuple(range(1, 9))


def _sum(x: Tensor, bias: Tensor | None) -> tuple[Tensor, torch.dtype]:
    """``x + bias`` in float32, as the contract asks, and the dtype of the result."""
    if bias is None:
        return x, x.dtype  # npu_gelu computes in float32 inside; there is no sum to round
    return x.float() + bias.float(), torch.promote_types(x.dtype, bias.dtype)


def _sum_cost(x: Any, bias: Any, approximate: str) -> int | None:
    """float32 tensors of x's size: the sum, x where it is narrower, and what the vendor returns, before it is cast."""
    if bias is None:
        return None
    narrow = (x.dtype != torch.float32) + (torch.promote_types(x.dtype, bias.dtype) != torch.float32)
    return 4 * prod(x.shape) * (1 + narrow)


def _sum_again_cost(grad: Any, x: Any, bias: Any, approximate: str, needs: tuple[bool, ...]) -> int | None:
    return _sum_cost(x, bias, approximate)


_SUM = "the vendor's op takes no bias: x + bias is a float32 tensor of its own"


@kernel(
    ops.bias_gelu,
    DType("x", *_DTYPES),
    DType("bias", *_DTYPES),
    Rank("x", *_RANKS),
    source="torch_npu.npu_gelu",
    adapts=(Adaptation("sum", _SUM, _sum_cost),),
)
def bias_gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """Both forms, by name."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    u, out = _sum(x, bias)
    return cast("Tensor", torch_npu.npu_gelu(u.contiguous(), approximate=approximate)).to(out)  # pyright: ignore


@kernel(
    ops.bias_gelu,
    DType("x", *_DTYPES),
    DType("bias", *_DTYPES),
    Rank("x", *_RANKS),
    direction="backward",
    source="torch_npu.npu_gelu_backward",
    adapts=(Adaptation("sum", f"{_SUM}, made again", _sum_again_cost),),
)
def bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and bias; the bias's summed in float32."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    u, _ = _sum(x, bias)
    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    du: Tensor = vendor.npu_gelu_backward(grad.to(u.dtype).contiguous(), u.contiguous(), approximate=approximate)
    dbias = du.float().sum_to_size(bias.shape).to(bias.dtype) if bias is not None and needs[1] else None
    return (du.to(x.dtype) if needs[0] else None), dbias

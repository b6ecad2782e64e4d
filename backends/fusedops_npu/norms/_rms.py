"""Helpers for the RMSNorm kernels: the vendor's gamma and shapes, and the sentences of the adaptations."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops import Adaptation

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def gamma_of(weight: Tensor | None, offset: float, dtype: torch.dtype, size: int, device: torch.device) -> Tensor:
    """Return ``offset + weight`` as the vendor takes it: of the dtype of the rows, or float32 beside any of DTYPES."""
    if weight is None:
        return _ones(size, device)
    return weight.contiguous() if offset == 0 and weight.dtype in (dtype, torch.float32) else weight.float() + offset


@lru_cache(maxsize=16)  # models use a few widths
def _ones(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, dtype=torch.float32, device=device)


def as_rows(tensor: Tensor, size: int) -> Tensor:
    """View as (rows, size) what has not the 2 to 8 dimensions that the vendor documents. ``size`` is its last one."""
    return tensor if 2 <= tensor.dim() <= 8 else tensor.reshape(-1, size)


def _vector_cost(rows: Any, weight: Any, offset: float) -> int | None:
    """Return the bytes of the float32 gamma, None where the weight is passed as it is."""
    if weight is not None and offset == 0 and weight.dtype in (rows.dtype, torch.float32):
        return None
    return 4 * int(rows.shape[-1])


def forward_cost(x: Any, *rest: Any) -> int | None:
    """Return the bytes of gamma for the arguments of rms_norm or add_rms_norm."""
    weight, _, offset = rest[-3:]
    return _vector_cost(x, weight, offset)


def backward_cost(grad: Any, *rest: Any) -> int | None:
    """Return the same for the arguments of rms_norm's backward."""
    return _vector_cost(rest[0], rest[2], rest[3])


def sum_gamma_cost(grad_y: Any, grad_s: Any, s: Any, rstd: Any, weight: Any, offset: float, *rest: Any) -> int | None:
    """Return the same for the arguments of add_rms_norm's backward, whose rows are float32."""
    given = weight is not None and offset == 0 and weight.dtype is torch.float32
    return None if given else 4 * int(s.shape[-1])


def sum_cost(grad_y: Any, grad_s: Any, s: Any, *rest: Any) -> int:
    """Return the bytes of the gradient of the rows and of its sum with that of s, and of the rows in float32."""
    copies = 0 if s.dtype is torch.float32 else 8
    return prod(s.shape) * (8 + copies)


_GAMMA = "gamma is a float32 vector: offset + weight, or ones, created once per size"
FORWARD_GAMMA = Adaptation("gamma", _GAMMA, forward_cost)
BACKWARD_GAMMA = Adaptation("gamma", _GAMMA, backward_cost)
SUM_GAMMA = Adaptation("gamma", _GAMMA, sum_gamma_cost)
SUM = Adaptation(
    "sum", "the vendor's backward has no residual: it runs in float32, and the residual's gradient is added", sum_cost
)

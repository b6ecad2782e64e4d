"""Dtypes, tensors and comparison of the cpu backend's tests of values."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.2e-3}


def rounded(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: Tensor, wanted: Tensor, scale: float = 1.0) -> None:
    assert got.shape == wanted.shape
    assert got.is_contiguous()
    tolerance = TOLERANCE[got.dtype] * scale
    torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)

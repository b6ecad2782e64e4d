"""Assumptions of the npu backend about npu_group_norm_silu, which ``make npu`` checks on the device."""

from __future__ import annotations

import pytest
import torch
from npu_vendor import DTYPES
from right import assert_right

import fusedops


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 32, 1), (1, 96, 33), (2, 320, 16, 16), (1, 64, 3, 9, 9)])
def test_shapes_and_dtypes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (4 * torch.randn(shape) + 3).to(dtype).npu()
    weight, bias = (torch.randn(shape[1]).to(kind).npu() for kind in (dtype, torch.float32))
    with fusedops.use("npu,eager", fallback="silent"):  # backward is in torch
        for affine in ((None, None), (weight, weight), (bias, bias), (weight, bias), (None, bias)):
            assert_right("group_norm", x, 32, *affine, activation="silu", device="npu")

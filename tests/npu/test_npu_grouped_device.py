"""Assumptions of the npu backend about npu_grouped_matmul, which ``make npu`` checks on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from npu_vendor import DTYPES, REAL, npu_alone
from right import assert_right

SCALE = 8 if REAL else 1


@pytest.fixture(autouse=True)
def torch_npu() -> Iterator[Any]:
    """The vendor's module; every call is served by the npu backend, or fails."""
    with npu_alone() as module:
        yield module


def check(rows: int, k: int, n: int, ends: list[int], dtype: torch.dtype, transposed: bool, tail: float = 0.0) -> None:
    x, experts = torch.randn(rows, k), len(ends)
    x[ends[-1] :] += tail
    weight = torch.randn((experts, k, n) if transposed else (experts, n, k)) / math.sqrt(k)
    call: dict[str, Any] = {
        "x": x.to(dtype).npu(),
        "weight": weight.to(dtype).npu(),
        "offsets": torch.tensor(ends).npu(),
        "bias": torch.randn(experts, n).to(dtype).npu(),
        "transposed": transposed,
    }
    assert_right("grouped_matmul", **call, device="npu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_groups(dtype: torch.dtype, transposed: bool) -> None:
    """Also empty groups, first and last, and rows past the last end, which are not finite."""
    check(48 * SCALE, 32 * SCALE, 64 * SCALE, [0, 13, 13, 30, 30], dtype, transposed, tail=math.inf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_rows_have_one_group(dtype: torch.dtype) -> None:
    check(32 * SCALE, 32, 16, [0, 0, 32 * SCALE, 32 * SCALE], dtype, False)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 8, 1), (8, 1, 1), (1, 1, 8), (7, 13, 33)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_small_sizes(sizes: tuple[int, int, int], transposed: bool) -> None:
    check(*sizes, [sizes[0] // 2, sizes[0]], torch.float32, transposed)


def test_the_most_groups() -> None:
    ends = torch.arange(1, 1024).tolist()
    check(1024, 16, 16, ends, torch.bfloat16, False)

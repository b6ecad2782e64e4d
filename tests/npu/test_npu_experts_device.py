"""Assumptions of the npu backend about the steps of experts, which ``make npu`` checks on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from npu_vendor import DTYPES, REAL, npu_alone, of_a_device
from right import assert_right

ACTIVATIONS = ("swiglu", "geglu", "geglu_tanh", "silu", "gelu", "gelu_tanh", "relu", "relu2")
SCALE = 8 if REAL else 1


@pytest.fixture(autouse=True)
def torch_npu() -> Iterator[Any]:
    """The vendor's module; every call is served by the npu backend, or fails."""
    with npu_alone() as module:
        yield module


def check(tokens: int, experts: int, h: int, inner: int, dtype: torch.dtype, index: Any = None, **options: Any) -> None:
    rows = 2 * inner if options.get("activation", "swiglu") in ("swiglu", "geglu", "geglu_tanh") else inner
    up, down = torch.randn(experts, rows, h) / math.sqrt(h), torch.randn(experts, h, inner) / math.sqrt(inner)
    if options.get("transposed"):
        up, down = up.mT.contiguous(), down.mT.contiguous()
    index = torch.randint(-1, experts + 1, (tokens, 2)) if index is None else index
    call: dict[str, Any] = {
        "x": torch.randn(tokens, h).to(dtype).npu(),
        "index": index.npu(),
        "weights": torch.rand(index.shape).npu(),
        "up": up.to(dtype).npu(),
        "down": down.to(dtype).npu(),
        "up_bias": torch.randn(experts, rows).to(dtype).npu(),
        "down_bias": torch.randn(experts, h).to(dtype).npu(),
    }
    assert_right("experts", **call, **options, device="npu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_sentinels(dtype: torch.dtype, activation: str) -> None:
    check(24 * SCALE, 4, 32 * SCALE, 16 * SCALE, dtype, activation=activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpt_oss(dtype: torch.dtype) -> None:
    options = {"limit": 7.0, "alpha": 1.702, "offset": 1.0, "interleaved": True, "transposed": True}
    check(16 * SCALE, 4, 48, 40, dtype, **options)


@pytest.mark.parametrize("expert", [0, 3, 4, -1])
def test_all_tokens_have_one_expert_or_none(expert: int) -> None:
    """Stable in the order of tokens: twice the same expert, and experts without a token."""
    check(9, 4, 16, 8, torch.float32, torch.full((9, 2), expert))


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 8, 16, 8), (7, 3, 33, 13)], ids=str)
def test_small_sizes(sizes: tuple[int, int, int, int]) -> None:
    check(*sizes, torch.float32)


@pytest.mark.parametrize("experts", [pytest.param(1023, marks=of_a_device)])
def test_the_most_experts(experts: int) -> None:
    check(600, experts, 16, 8, torch.bfloat16)

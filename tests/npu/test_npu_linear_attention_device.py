"""Assumptions of the npu backend about npu_recurrent_gated_delta_rule, which ``make npu`` checks on the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from npu_vendor import REAL, npu_alone
from right import assert_right

import fusedops

HALF = torch.bfloat16
SIZE = 128 if REAL else 16


@pytest.fixture(autouse=True)
def torch_npu() -> Iterator[Any]:
    """The vendor's module; eager has the gradients."""
    with npu_alone("silent") as module:
        yield module


def tensors(positions: int, heads: tuple[int, int], sizes: tuple[int, int], decay: int = 3) -> dict[str, Any]:
    """Return a call of two sequences; ``decay`` is the rank of its decay, 0 for none."""
    (hk, hv), (dk, dv) = heads, sizes
    shapes = {"q": (2, positions, hk, dk), "k": (2, positions, hk, dk), "v": (2, positions, hv, dv)}
    call: dict[str, Any] = {name: torch.randn(shape).to(HALF) for name, shape in shapes.items()}
    call |= {"beta": torch.rand(2, positions, hv).to(HALF), "initial_state": torch.randn(2, hv, dk, dv).to(HALF)}
    if decay:
        call["decay"] = -torch.rand((2, positions, hv, dk)[:decay]).exp()
    return {**call, "normalize": True}


def check(call: dict[str, Any]) -> None:
    given = {name: each.npu() if isinstance(each, torch.Tensor) else each for name, each in call.items()}
    assert fusedops.explain("linear_attention", **given).backend == "npu"
    assert_right("linear_attention", **given, return_state=True, device="npu")


@pytest.mark.parametrize("positions", [1, 2, 7, 8])
@pytest.mark.parametrize("decay", [0, 3, 4])
def test_kinds_and_lengths(positions: int, decay: int) -> None:
    """DeltaNet, gated DeltaNet and KDA."""
    check(tensors(positions, (2, 4), (SIZE, SIZE), decay))


@pytest.mark.parametrize("sizes", [(1, 1), (13, 5), (SIZE, 1), (1, SIZE), (512, 16), (16, 512)], ids=str)
def test_sizes(sizes: tuple[int, int]) -> None:
    check(tensors(3, (1, 2), sizes))


def test_qwen3_next() -> None:
    check(tensors(1, (16, 32), (SIZE, SIZE)))


def test_the_most_heads() -> None:
    check(tensors(1, (256, 256), (16, 16)))


def test_numbers_that_canns_page_excludes() -> None:
    """Its ranges are open: a decay of 0 and of -inf, a beta of 0, 1 and 2."""
    call = tensors(6, (2, 4), (SIZE, SIZE))
    call["decay"][:, 1], call["decay"][:, 3], call["decay"][:, 5, 0] = 0.0, -math.inf, -200.0
    call["beta"][:, 0], call["beta"][:, 2], call["beta"][:, 4] = 0.0, 1.0, 2.0
    check(call)

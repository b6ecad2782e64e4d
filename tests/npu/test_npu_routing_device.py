"""Assumptions of the npu backend about npu_moe_gating_top_k, which ``make npu`` checks on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from npu_vendor import DTYPES, npu_alone
from right import assert_right

import fusedops

DEEPSEEK_V3: dict[str, Any] = {"score": "sigmoid", "groups": 8, "top_groups": 4, "normalize": True, "scale": 2.5}


@pytest.fixture(autouse=True)
def torch_npu() -> Iterator[Any]:
    """The vendor's module; every call is served by the npu backend, or fails."""
    with npu_alone() as module:
        yield module


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("experts", [3, 8, 33, 128, 2048])
def test_one_group(dtype: torch.dtype, experts: int) -> None:
    logits, k = torch.randn(64, experts).to(dtype).npu(), min(8, experts)
    for score in ("softmax", "sigmoid"):
        for normalize in (False, True):
            assert_right("top_k_routing", logits=logits, k=k, score=score, normalize=normalize, device="npu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_score", ["top2", "max"])
def test_groups(dtype: torch.dtype, group_score: str) -> None:
    for experts, k in ((24, 3), (256, 8), (320, 8)):
        logits, bias = torch.randn(64, experts).to(dtype).npu(), torch.randn(experts).npu()
        options = {**DEEPSEEK_V3, "group_score": group_score}
        assert_right("top_k_routing", logits=logits, k=k, bias=bias, **options, device="npu")


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 8])
def test_ties_go_to_the_lowest_index(score: str, groups: int) -> None:
    """As the vendor's pages have it; of the merge of sorted groups no page states it."""
    for experts in (64, 256, 512):
        options = {"score": score, "groups": groups, "top_groups": min(4, groups), "group_score": "max"}
        few = torch.randint(0, 3, (64, experts)).float()
        for logits in (few, torch.ones(4, experts)):
            assert_right("top_k_routing", logits=logits.npu(), k=8, **options, device="npu")


def test_rows_with_nan_reach_no_other() -> None:
    logits = torch.randn(64, 128)
    logits[::3, 5] = float("nan")
    weights, index = (each.cpu() for each in fusedops.top_k_routing(logits.npu(), 8, score="sigmoid"))
    assert bool(weights[::3].isnan().all())
    assert index[0].tolist() == list(range(8))
    kept = [row for row in range(64) if row % 3]
    assert_right("top_k_routing", logits=logits[kept].npu(), k=8, score="sigmoid", device="npu")
    assert torch.equal(index[kept], fusedops.top_k_routing(logits[kept].npu(), 8, score="sigmoid")[1].cpu())

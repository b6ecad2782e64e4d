"""The kernel of rotary_embedding, run by Triton's interpreter: bytes, one launch, layouts that are read where they are.

tests/ops/test_rotary_embedding.py and the conformance kit compare its numbers with float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairwise import pairwise
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from triton_traffic import Traffic, total

from fusedops.testing import OPS
from fusedops_triton.launch import launcher, settings
from fusedops_triton.rotary._rotary import rotate


def call(seq_dim: int, dtype: torch.dtype, rotated: int, dim: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k = torch.randn(2, 6, 20, dim).to(dtype), torch.randn(2, 2, 20, dim).to(dtype)
    if seq_dim == -3:
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
    return q, k, torch.randn(20, rotated // 2), torch.randn(20, rotated // 2)


@pytest.mark.parametrize(
    ("forward", "seq_dim", "rotated", "interleaved", "dtype"),
    pairwise([True, False], [-2, -3], [64, 32, 20], [False, True], [torch.bfloat16, torch.float32]),
)
def test_each_direction_moves_the_fewest_bytes(
    forward: bool, seq_dim: int, rotated: int, interleaved: bool, dtype: torch.dtype, traffic: Traffic
) -> None:
    q, k, cos, sin = call(seq_dim, dtype, rotated)
    fewest = OPS["rotary_embedding"].evidence.min_bytes(q, k, cos, sin, interleaved, seq_dim)["forward"]
    rotate(q, k, cos, sin, interleaved, seq_dim, forward)
    again = sum(traffic.asked(angle) - traffic.distinct(angle) for angle in (cos, sin))  # from a cache
    assert total(traffic) - again == fewest


def test_cos_is_asked_for_once_for_several_heads(traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the address of a row, not in bytes of memory: a program's second row of a position comes from its L1 cache."""
    q, k, cos, sin = call(-2, torch.bfloat16, 64)
    rotate(q, k, cos, sin, False, -2)
    programs = [loaded for loaded in traffic.of(cos, "loads") if loaded.size]
    distinct = sum(len(set(loaded.ravel().tolist())) for loaded in programs) * cos.element_size()
    # 6 heads of q are two groups of at most 4, and k's 2 heads one, for each of the two batches
    assert distinct == 2 * 3 * cos.nbytes
    assert traffic.asked(cos) == 2 * 8 * cos.nbytes
    monkeypatch.setattr("fusedops_triton.rotary._rotary.ROTARY_HEADS", 1)
    launcher.clear_layout_caches()
    before = len(programs)
    rotate(q, k, cos, sin, False, -2)
    launcher.clear_layout_caches()
    assert len(traffic.of(cos, "loads")) > before
    assert settings.ROTARY_HEADS == 4


def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    run = launcher.Launch.__call__

    def spy(self: Any, *args: Any) -> Any:
        seen.append(self)
        return run(self, *args)

    monkeypatch.setattr(launcher.Launch, "__call__", spy)
    return seen


def test_q_and_k_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = launches(monkeypatch)
    q, k, cos, sin = call(-2, torch.bfloat16, 32)
    rotate(q, k, cos, sin, False, -2)
    rotate(q, k.float(), cos, sin, True, -2)
    rotate(q, None, cos, sin, False, -2)
    assert len(seen) == 3


@pytest.mark.parametrize("interleaved", [False, True])
def test_views_are_read_where_they_are(interleaved: bool, traffic: Traffic) -> None:
    stored = torch.randn(2, 20, 6, 64)
    doubled = torch.randn(20, 64)
    q, cos = stored.transpose(1, 2), doubled[:, :32]
    rotate(q, None, cos, cos, interleaved, -2)
    assert traffic.distinct(stored) == stored.nbytes
    assert traffic.asked(stored) == stored.nbytes
    assert traffic.distinct(doubled) == doubled.nbytes // 2


@pytest.mark.parametrize(
    ("dim", "heads", "length"), pairwise([2, 6, 130], [(1, 1), (5, 3), (17, 1)], [1, 3, 33]), ids=str
)
def test_every_tiling(dim: int, heads: tuple[int, int], length: int) -> None:
    q, k = torch.randn(2, heads[0], length, dim), torch.randn(2, heads[1], length, dim)
    cos, sin = torch.randn(2, length, dim // 2), torch.randn(2, length, dim // 2)
    for interleaved in (False, True):
        got = rotate(q, k, cos, sin, interleaved, -2)
        want = OPS["rotary_embedding"].reference(q, k, cos, sin, interleaved, -2)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)

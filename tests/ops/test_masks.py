"""fusedops.masks: each converter against the meaning of the form that it converts."""

from __future__ import annotations

import math

import pytest
import torch

import fusedops
from fusedops import masks

Q, K, V = (torch.randn(2, 2, s, 4, generator=torch.Generator().manual_seed(s)) for s in (5, 6, 6))
F32 = torch.finfo(torch.float32).min


@pytest.mark.parametrize("kind", ["bool", "additive", "lowest"])
def test_masks_of_torch_mean_the_same(kind: str) -> None:
    mask = torch.rand(2, 1, 5, 6, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[..., 2] = True
    given = mask
    if kind != "bool":
        given = torch.zeros(mask.shape).masked_fill(~mask, -math.inf if kind == "additive" else F32)
    want = torch.nn.functional.scaled_dot_product_attention(Q, K, V, given)
    torch.testing.assert_close(fusedops.attention(Q, K, V, masks.from_sdpa(given)), want)
    torch.testing.assert_close(masks.from_sdpa(given), ~mask)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_lengths(padding: str) -> None:
    mask = masks.from_lengths(torch.tensor([0, 2, 4]), 4, padding=padding)
    assert mask.shape == (3, 1, 1, 4)
    for row, length in zip(mask.flatten(1).tolist(), (0, 2, 4)):
        side = [False] * length + [True] * (4 - length)
        assert row == (side if padding == "right" else side[::-1])


def test_packed_sequences_are_attended_alone() -> None:
    """Also an empty one, other lengths of keys, and padding beyond the last."""
    cu_q, cu_k = torch.tensor([0, 2, 2, 4], dtype=torch.int32), torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    out = fusedops.attention(Q[:1], K[:1], V[:1], masks.from_cu_seqlens(cu_q, 5, cu_k, 6))
    for at in range(3):
        rows, keys = (slice(int(cu[at]), int(cu[at + 1])) for cu in (cu_q, cu_k))
        alone = fusedops.attention(Q[:1, :, rows], K[:1, :, keys], V[:1, :, keys])
        torch.testing.assert_close(out[:, :, rows], alone)
    assert bool((out[:, :, 4:] == 0).all())
    assert bool(masks.from_cu_seqlens(cu_q, 5)[:, 4].all())


def test_additive_masks_without_elements() -> None:
    assert masks.from_additive(torch.zeros(3, 0)).shape == (3, 0)
    assert masks.from_additive(torch.tensor(0.0)).shape == ()

"""Bool masks of other libraries, whose bytes are neither 0 nor 1."""

from __future__ import annotations

import pytest
import torch

import fusedops


@pytest.mark.parametrize("size", [20, 300])  # below and above the size from which slabs compute
@pytest.mark.parametrize("byte", [2, 128, 255])
@pytest.mark.parametrize("causal", [False, True])
def test_every_byte_but_zero_masks(size: int, byte: int, causal: bool) -> None:
    x = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    raw = torch.zeros(size, size, dtype=torch.uint8)
    raw[:, size // 2 :] = byte
    raw[0] = byte
    y = fusedops.scaled_masked_softmax(x, raw.view(torch.bool), causal=causal, backend="eager")
    assert (y[raw != 0] == 0).all()
    want = fusedops.scaled_masked_softmax(x, raw != 0, causal=causal, backend="eager")
    assert torch.equal(y, want)

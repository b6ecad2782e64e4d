"""Dropout's keep bits are the same on every backend: a million of them, for three seeds."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops import testing


@pytest.mark.parametrize("seed", [1, 2**40 + 7, -5])
@pytest.mark.parametrize("backend", ["eager", "triton", "loopback"])
def test_the_first_million_keep_bits(backend: str, seed: int) -> None:
    """testing.keep_mask is itself held against an independent Philox by tests/test_eager_bias.py."""
    x = torch.ones(10**6)
    with fusedops.use(backend, fallback="raise"):
        y = fusedops.bias_dropout(x, None, 0.3, seed=seed)
    assert torch.equal(y != 0, testing.keep_mask(torch.tensor([seed]), 0.3, x.shape))

"""Dropout's keep bits are the same on every backend: a million of them, for three seeds."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops import testing

SLOW = pytest.mark.slow  # Triton's interpreter takes ten seconds for a million


@pytest.mark.parametrize("seed", [1, 2**40 + 7, -5])
@pytest.mark.parametrize(
    ("backend", "size"),
    [("eager", 10**6), ("loopback", 10**6), ("triton", 10**5), pytest.param("triton", 10**6, marks=SLOW)],
)
def test_the_first_keep_bits(backend: str, size: int, seed: int) -> None:
    """Compare with testing.keep_mask, which test_eager_philox.py compares with an independent Philox."""
    x = torch.ones(size)
    with fusedops.use(backend, fallback="raise"):
        y = fusedops.bias_dropout(x, None, 0.3, seed=seed)
    assert torch.equal(y != 0, testing.keep_mask(torch.tensor([seed]), 0.3, x.shape))

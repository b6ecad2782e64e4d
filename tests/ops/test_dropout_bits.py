"""Dropout's keep bits are the same on every backend: a million of them, for three seeds or one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

import fusedops
from fusedops import testing

SEEDS = (1, 2**40 + 7, -5)


@pytest.mark.parametrize(
    ("backend", "size", "seed"),
    [
        *((backend, size, seed) for backend, size in (("eager", 10**6), ("loopback", 10**6), ("triton", 10**4))
          for seed in SEEDS),
        # ten seconds of Triton's interpreter, for the counters that a hundredth of it does not reach
        pytest.param("triton", 10**6, SEEDS[1], marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_first_keep_bits(backend: str, size: int, seed: int) -> None:
    """Compare with testing.keep_mask, which test_eager_philox.py compares with an independent Philox."""
    x = torch.ones(size)
    with fusedops.use(backend, fallback="raise"):
        y = fusedops.bias_dropout(x, None, 0.3, seed=seed)
    assert torch.equal(y != 0, testing.keep_mask(torch.tensor([seed]), 0.3, x.shape))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: fusedops.bias_dropout(x, torch.ones(5), 0.5),
        lambda x: fusedops.bias_dropout(x.long(), None, 0.5),
        lambda x: fusedops.bias_dropout(x, None, 0.5, backend="no_such_backend"),
        lambda x: fusedops.use("npu", fallback="raise")(fusedops.bias_dropout)(x, None, 0.5),
        lambda x: fusedops.bind("bias_dropout", x, None, 0.5),
    ],
    ids=["a wrong bias", "integers", "an unknown backend", "no backend", "bind"],
)
def test_what_is_not_served_draws_nothing(call: Any) -> None:
    before = torch.get_rng_state()
    with suppress(fusedops.FusedOpsError):
        call(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)
    fusedops.bias_dropout(torch.ones(3), None, 0.5)
    assert not torch.equal(torch.get_rng_state(), before)

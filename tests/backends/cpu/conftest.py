"""Fixtures of the cpu backend's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fusedops


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Serve every call of the test by the cpu backend, or raise; skipped where it is unavailable."""
    (info,) = [info for info in fusedops.backends() if info.name == "cpu"]
    if info.state != "ready":
        pytest.skip(info.why)
    with fusedops.use("cpu", fallback="raise"):
        yield


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads after a test that changes it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)

"""Fixtures of the cpu backend's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fusedops


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Serve every call of the test by the cpu backend, or raise; skipped where it is unavailable."""
    (info,) = [info for info in fusedops.backends() if info.name == "cpu"]
    if info.state != "ready":
        pytest.skip(info.why)
    with fusedops.use("cpu", fallback="raise"):
        yield

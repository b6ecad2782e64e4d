"""Fixtures of the tests of the ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fusedops


@pytest.fixture(autouse=True)
def compiled_library(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a test of ``backend="cpu"`` fall back for the dtypes that the library has not; skip it without a library."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is None or callspec.params.get("backend") != "cpu":
        yield
        return
    (info,) = [info for info in fusedops.backends() if info.name == "cpu"]
    if info.state != "ready":
        pytest.skip(info.why)
    with fusedops.use("cpu", fallback="silent"):
        yield


@pytest.fixture(params=["eager", "cpu"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test on eager and on cpu, without a fallback; skip it without the library."""
    name: str = request.param
    (info,) = [info for info in fusedops.backends() if info.name == name]
    if info.state not in ("ready", "not probed"):
        pytest.skip(info.why)
    with fusedops.use(name, fallback="raise"):
        yield name

"""The conformance kit on every backend: those that no machine of the tests has on stand-ins, triton interpreted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance import BACKENDS, every_check, passes

from fusedops import testing


@pytest.fixture(scope="module")
def installed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Install a backend, or its stand-in, for its checks."""
    with BACKENDS[request.param]():
        yield


#: With pytest.mark.slow, besides those of ``conformance.py``: of large tensors.
SLOW = ("npu-experts/forward/constraints", "npu-experts/backward/constraints")


@every_check(SLOW)
def test_the_kit_passes(installed: None, checks: list[testing.Check]) -> None:
    passes(*checks)

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


#: With pytest.mark.slow: of many launches each, large products, or experts one by one. They took 60 s of one core.
SLOW = (
    "cpu-experts/backward/calls",
    "eager-experts/forward/calls",
    "eager-experts/backward/calls",
    "eager-linear_cross_entropy/forward/calls",
    "eager-linear_cross_entropy/backward/calls",
    "npu-experts/forward/constraints",
    "npu-experts/forward/calls",
    "npu-experts/backward/constraints",
    "npu-experts/backward/calls",
    "triton-gated_rms_norm/backward/calls",
    "triton-experts/forward/calls",
    "triton-experts/backward/calls",
    "triton-linear_cross_entropy/forward/calls",
    "triton-linear_cross_entropy/forward/sizes",
)


@every_check(SLOW)
def test_the_kit_passes(installed: None, check: testing.Check) -> None:
    passes(check)

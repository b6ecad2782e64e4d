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


#: With pytest.mark.slow, besides calls: of large tensors, and of many loads in the interpreter.
SLOW = (
    "npu-experts/forward/constraints",
    "npu-experts/backward/constraints",
    "triton-causal_conv1d/backward/sizes",
    "triton-linear_cross_entropy/forward/sizes",
    # of several chunks, in the interpreter
    *(f"triton-linear_attention/forward/{name}" for name in ("fake", "history", "memory", "sizes")),
    *(f"triton-linear_attention/both/{name}" for name in ("autograd", "checkpoint", "opcheck")),
    *(
        f"triton-linear_attention/backward/{name}"
        for name in (
            "between",
            "constraints",
            "fake",
            "history",
            "infinite",
            "inputs",
            "kernel",
            "memory",
            "needs",
            "shared",
            "sizes",
            "state",
            "swapped",
        )
    ),
)


@every_check(SLOW)
def test_the_kit_passes(installed: None, check: testing.Check) -> None:
    passes(check)

"""The conformance kit on every backend: those that no machine of the tests has on stand-ins, triton interpreted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance import BACKENDS, every_check, passes

from fusedops import testing


@pytest.fixture(scope="module")
def installed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Install a backend, or its stand-in, for its checks."""
    backend, _ = request.param
    with BACKENDS[backend]():
        yield


#: With pytest.mark.slow, besides those of ``conformance.py``: of large tensors, or of 32,766 sequences.
SLOW = [
    f"{kernel}/{direction}/constraints"
    for kernel in ("npu-experts", "flash_attn_on_cpu-varlen_attention", "sdpa_cuda_on_cpu-varlen_attention")
    for direction in ("forward", "backward")
]


@every_check(SLOW)
def test_the_kit_passes(installed: None, checks: list[testing.Check]) -> None:
    passes(*checks)

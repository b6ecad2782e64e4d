"""The conformance kit on the backends of this project, one test file each so that they run side by side."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from ascend import ascend
from loopback import loopback

from fusedops import testing

# triton by its interpreter, which takes a second for 10^5 elements; npu on the stand-in device
BACKENDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "eager": nullcontext,
    "sdpa": nullcontext,
    "triton": nullcontext,
    "npu": ascend,
    "loopback": loopback,
}
ELEMENTS = {"eager": 2**15, "sdpa": 2**15, "triton": 2**11, "npu": 2**17, "loopback": 2**11}


def every_check(backend: str) -> pytest.MarkDecorator:
    """Run a test with each check of a backend, as ``check``."""
    with BACKENDS[backend]():
        checks = testing.checks(backend, elements=ELEMENTS[backend])
        return pytest.mark.parametrize("check", [pytest.param(check, id=f"{backend}-{check.id}") for check in checks])


def passes(check: testing.Check) -> None:
    """Assert that a check passes, with one thread: barriers between threads take ten times as long as small sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with BACKENDS[check.backend]():
            result = check.run()
    finally:
        torch.set_num_threads(before)
    assert not result.failures, str(result)
    # of a kernel that takes one of several tensors alone no dtypes can be mixed, and no gradient wanted alone
    assert result.cases or (check.backend, check.name) in {("npu", "dtypes"), ("npu", "needs")}

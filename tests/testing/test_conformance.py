"""The conformance kit on every backend of this project, and on the ops' own references as a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: on a busy machine barriers between threads take ten times as long as these small sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def every_check() -> Iterator[Any]:
    for name, machine in BACKENDS.items():
        with machine():
            yield from (
                pytest.param(check, id=f"{name}-{check.id}") for check in testing.checks(name, elements=ELEMENTS[name])
            )


@pytest.mark.parametrize("check", [*every_check()])
def test_the_kit_passes(check: testing.Check) -> None:
    with BACKENDS[check.backend]():
        result = check.run()
    assert not result.failures, str(result)
    # of a kernel that takes one of several tensors alone no dtypes can be mixed, and no gradient wanted alone
    assert result.cases or (check.backend, check.name) in {("npu", "dtypes"), ("npu", "needs")}

"""Fixtures of the tests of the npu backend, on the stand-in device."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from ascend import ascend
from standin import installed


@pytest.fixture
def torch_npu() -> Iterator[ModuleType]:
    """The fake torch_npu, on a machine where the npu backend is ready."""
    with ascend() as module:
        yield module


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The stand-in device."""
    with installed():
        yield torch.device("npu")

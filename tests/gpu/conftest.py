"""Fixtures of the tests on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from gpu_calls import CUDA

import fusedops


@pytest.fixture(autouse=True)
def only_triton() -> Iterator[None]:
    with fusedops.use("triton", fallback="raise"):
        yield
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()

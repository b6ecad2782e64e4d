"""The vendor's torch_npu where there is an Ascend device, for ``make npu``; everywhere else the stand-in for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

import fusedops

try:
    import torch_npu as _vendor  # type: ignore[import-not-found]

    REAL = bool(torch.npu.is_available())
except Exception:  # absent, or without CANN
    REAL = False

# What a device shows of each dtype: on the stand-in, which runs torch's arithmetic, the kit has every dtype already.
of_a_device = () if REAL else pytest.mark.slow
DTYPES = (torch.float32, *(pytest.param(dtype, marks=of_a_device) for dtype in (torch.float16, torch.bfloat16)))


@contextmanager
def npu_alone(fallback: str = "raise") -> Iterator[Any]:
    """Yield the vendor's module; every call is served by the npu backend, or fails where ``fallback`` is "raise"."""
    with _module() as module, fusedops.use("npu", fallback=fallback):
        yield module


def _module() -> AbstractContextManager[Any]:
    if REAL:
        return nullcontext(_vendor)
    from ascend import ascend

    return ascend()

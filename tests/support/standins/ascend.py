"""The npu backend on the stand-in device: nothing here is evidence from hardware."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from standin import installed
from state import probe_again


@contextmanager
def ascend() -> Iterator[ModuleType]:
    """A machine with a stand-in Ascend device, on which the npu backend is ready. Yields the fake torch_npu."""
    with installed() as torch_npu:
        probe_again("npu")
        try:
            yield torch_npu
        finally:
            probe_again("npu")

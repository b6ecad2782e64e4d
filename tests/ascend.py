"""The npu backend on the stand-in device: nothing here is evidence from hardware."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from standin import installed

from fusedops import _plan
from fusedops._registry import registry


def probe_again() -> None:
    """Lets the npu backend be probed anew: what it finds depends on which torch_npu can be imported."""
    record = registry.find("npu")
    assert record is not None
    record.probed = False
    record.unavailable = None
    record.error = None
    _plan.forget_warnings()


@contextmanager
def ascend() -> Iterator[ModuleType]:
    """A machine with a stand-in Ascend device, on which the npu backend is ready. Yields the fake torch_npu."""
    with installed() as torch_npu:
        probe_again()
        try:
            yield torch_npu
        finally:
            probe_again()

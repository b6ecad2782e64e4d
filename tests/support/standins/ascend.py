"""The npu backend on the stand-in device: nothing here is evidence from hardware."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from standin import installed, npu_device
from state import probe_again
from torch import Tensor

import fusedops


@contextmanager
def ascend() -> Iterator[ModuleType]:
    """A machine with a stand-in Ascend device, on which the npu backend is ready. Yields the fake torch_npu."""
    with installed() as torch_npu:
        probe_again("npu")
        try:
            yield torch_npu
        finally:
            probe_again("npu")


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Serve calls by npu alone, and assert that the host does not wait for the device and copies nothing to it."""
    npu_device.reset()
    with fusedops.use("npu", fallback="raise"):
        yield
    assert npu_device.synchronisations() == 0
    assert npu_device.calls["copy_to_device"] == 0


def candidate(op: Any, *args: Any, **options: Any) -> Any:
    """Return what explain has of npu for a call."""
    (npu,) = [each for each in fusedops.explain(op, *args, **options).candidates if each.backend == "npu"]
    return npu


def on_npu(call: dict[str, Any], grow: bool = False) -> dict[str, Any]:
    """Return a call with its tensors on the device; with ``grow`` they are leaves."""
    return {
        name: each.to("npu", copy=True).requires_grad_(grow and each.is_floating_point())
        if isinstance(each, Tensor)
        else each
        for name, each in call.items()
    }

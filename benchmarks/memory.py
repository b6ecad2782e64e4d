"""The memory use of a call."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedops.integrations._benchmark import peak_bytes as peak_bytes


def resident_peak_bytes(function: Callable[[], Any]) -> int:
    """Return by how much a call raises the memory of this process at most, in bytes: any buffer counts. Linux alone.

    Raises:
        RuntimeError: the process keeps what it frees, which would count: it was not started with
            ``MALLOC_MMAP_THRESHOLD_=65536`` in its environment. Times are others with it.
    """
    if os.environ.get("MALLOC_MMAP_THRESHOLD_") != "65536":
        raise RuntimeError(
            "got a process that keeps the memory it frees, expected one that returns it; to fix: start it with "
            "MALLOC_MMAP_THRESHOLD_=65536 in its environment"
        )
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the memory now
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def saved_bytes(function: Callable[[], Any], arguments: Sequence[Tensor]) -> int:
    """Return the bytes of what a call saves for its backward pass, beside the arguments: each storage counts once."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    for argument in arguments:
        saved.pop(argument.untyped_storage().data_ptr(), None)
    del result
    return sum(saved.values())


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024

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
from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], Any], device: str) -> int:
    """Return the peak memory of a call in bytes, including its result, minus the memory in use before the call.

    On a CPU it is that of torch's tensors: buffers that a library allocates by itself do not count.
    """
    if device != "cpu":
        module = torch.get_device_module(device)
        gc.collect()
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        result = function()
        peak = module.max_memory_allocated() - before
        del result
        return peak
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del result
    return peak


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

"""The memory use of a call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], Any], device: str) -> int:
    """Return the peak memory of a call in bytes, including its result, minus the memory in use before the call."""
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

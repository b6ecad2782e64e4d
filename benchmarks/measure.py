"""Timing, and the yardstick: a copy of the same size, in the same process and the same turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: the median and the 20th and 80th percentiles."""

    p50: float
    p20: float
    p80: float


def interleaved(work: Mapping[str, Callable[[], object]], device: str, seconds: float) -> dict[str, Times]:
    """Times every function in turns, so that noise hits all alike, for about ``seconds`` each.

    On a GPU each call is timed by events, with a buffer larger than any L2 cache written in between.
    """
    one = _on_gpu if device == "cuda" else _on_cpu
    flush = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda") if device == "cuda" else None
    samples: dict[str, list[float]] = {}
    turns = 3
    for name, function in work.items():
        function()  # warms up, compiles
        first = one(function, flush)
        samples[name] = []
        turns = max(turns, min(50, int(seconds * 1e3 / max(first, 1e-3))))
    for _ in range(turns):
        for name, function in work.items():
            if sum(samples[name]) < seconds * 1e3 or len(samples[name]) < 5:
                samples[name].append(one(function, flush))
    return {name: _times(found) for name, found in samples.items()}


def _times(found: list[float]) -> Times:
    if len(found) < 2:
        return Times(found[0], found[0], found[0])
    cuts = statistics.quantiles(found, n=10, method="inclusive")
    return Times(statistics.median(found), cuts[1], cuts[7])


def _on_cpu(function: Callable[[], object], flush: torch.Tensor | None) -> float:
    start = time.perf_counter()
    result = function()
    took = (time.perf_counter() - start) * 1e3
    del result  # after the clock has stopped: freeing is the caller's
    return took


def _on_gpu(function: Callable[[], object], flush: torch.Tensor | None) -> float:
    assert flush is not None
    flush.zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def copy_of(like: torch.Tensor) -> Callable[[], object]:
    """``y.copy_(x)`` of a tensor's size: it moves twice the tensor's bytes."""
    source, target = torch.randn_like(like, dtype=torch.float32).to(like.dtype), torch.empty_like(like)
    return lambda: target.copy_(source)


def peak_bytes(function: Callable[[], Any], device: str) -> int:
    """The most memory that a call has in use at a time beyond what was there before, its result included."""
    if device == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        peak = torch.cuda.max_memory_allocated() - before
        del result
        return peak
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    found = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del result
    return peak

"""The peak memory of a call, for the tests of the eager kernels."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak(function: Callable[[], object], size: int) -> float:
    """Bytes allocated at the worst moment, as a multiple of ``size``; by the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = function()
    assert result is not None
    events = [(e.start_ns(), e.nbytes()) for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = worst = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        live += change
        worst = max(worst, live)
    assert live >= size, "the profiler saw no allocation: this test would pass whatever happened"
    return worst / size

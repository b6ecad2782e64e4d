"""Timing of functions in turns, and the calls that are timed. ``fusedops bench`` and benchmarks/ use both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._explain import explain
from fusedops._plugins.registration import BackendInfo
from fusedops._torch import cuda_sleep


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: the median and the 20th and 80th percentiles.

    >>> from fusedops import testing
    >>> testing.Times(p50=1.5, p20=1.25, p80=2.0).p50
    1.5
    """

    p50: float
    p20: float
    p80: float


def interleaved(
    work: Mapping[str, Callable[[], object]], device: str, seconds: float, idle: Callable[[], bool] | None = None
) -> dict[str, Times]:
    """Time every function in turns, so that noise affects all alike.

    On a GPU each call is timed by events, and a buffer larger than any L2 cache is read before it. The GPU waits
    until the call is queued, so that the host's time is not in the result. On any other device a call is timed by the
    clock, from one synchronization to the next.

    Args:
        work: the functions by name.
        device: a torch device, such as "cpu" or "cuda:0".
        seconds: the measuring time of each function, about.
        idle: returns True while the machine is idle. A call then waits for that, and counts only where ``idle`` is
            still True after it.

    Raises:
        TimeoutError: the machine was not idle for 100 times as long as the calls need.

    >>> from fusedops import testing
    >>> times = testing.interleaved({"list": list, "dict": dict}, "cpu", seconds=0.001)
    >>> times["list"].p20 <= times["list"].p50 <= times["list"].p80
    True
    """
    kind = torch.device(device).type
    flush = torch.zeros(64 * 2**20, dtype=torch.int64, device=device) if kind == "cuda" else None

    host: dict[Callable[[], object], float] = {}

    def time_once(function: Callable[[], object]) -> float:
        if flush is None:
            return _by_the_clock(function, kind)
        if function not in host:
            host[function] = _host_seconds(function)
        return _by_events(function, flush, host[function])

    def time_undisturbed(function: Callable[[], object], idle: Callable[[], bool]) -> float:
        while time.monotonic() < end:
            if idle():
                milliseconds = time_once(function)
                if idle():
                    return milliseconds
        raise TimeoutError(f"the machine is not idle: {patience:g} s were not enough for {', '.join(work)}")

    samples: dict[str, list[float]] = {}
    patience = 100 * seconds * len(work)
    end = time.monotonic() + patience
    turns = 3
    for name, function in work.items():
        function()  # warms up, compiles
        first = time_once(function)
        samples[name] = []
        turns = max(turns, min(50, int(seconds * 1e3 / max(first, 1e-3))))
    for _ in range(turns):
        for name, function in work.items():
            if sum(samples[name]) < seconds * 1e3 or len(samples[name]) < 5:
                samples[name].append(time_once(function) if idle is None else time_undisturbed(function, idle))
    return {name: _times(milliseconds) for name, milliseconds in samples.items()}


def _times(milliseconds: list[float]) -> Times:
    if len(milliseconds) < 2:
        return Times(milliseconds[0], milliseconds[0], milliseconds[0])
    cuts = statistics.quantiles(milliseconds, n=10, method="inclusive")
    return Times(statistics.median(milliseconds), cuts[1], cuts[7])


def _by_the_clock(function: Callable[[], object], kind: str) -> float:
    synchronize = torch.get_device_module(kind).synchronize  # does nothing on a CPU
    synchronize()
    start = time.perf_counter()
    result = function()
    synchronize()
    milliseconds = (time.perf_counter() - start) * 1e3
    del result  # after the clock has stopped: a caller frees the result in its own time
    return milliseconds


def _host_seconds(function: Callable[[], object]) -> float:
    """Return how long the host takes to queue a call on an idle GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _by_events(function: Callable[[], object], flush: Tensor, host_seconds: float) -> float:
    flush.sum()  # a read: what a write leaves in the cache is written back in the time of the call
    # in cycles: at 2 GHz twice the host's time. A call that waits for the GPU itself is held for 10 ms at most
    cuda_sleep(int(min(host_seconds, 0.005) * 4e9))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def copy_of(like: Tensor) -> Callable[[], object]:
    """Return ``y.copy_(x)`` of a tensor's size, which moves twice the tensor's bytes."""
    source, target = torch.randn_like(like, dtype=torch.float32).to(like.dtype), torch.empty_like(like)
    return lambda: target.copy_(source)


def served_by(backend: str, op: Op) -> Callable[..., Any]:
    """Return the public function of an op on one backend. It takes the op's arguments by position."""
    return lambda *args: op.function(**dict(zip(op.parameters, args)), backend=backend)


def refusal(info: BackendInfo, op: Op, args: Sequence[Any]) -> str | None:
    """Return why a backend does not take a call, or None where it does."""
    if info.state != "ready":
        return f"{info.state}: {info.why}"
    decision = explain(op.name, **dict(zip(op.parameters, args)), backend=info.name)
    candidate = next(candidate for candidate in decision.candidates if candidate.backend == info.name)
    return candidate.reasons[0].detail if candidate.reasons else None


def with_grad(op: Op, args: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
    """Return a call's arguments with leaves for the differentiable ones, and those leaves alone."""
    wanted = {*op.differentiable, op.passed_through}
    leaves = [
        arg.detach().clone().requires_grad_() if name in wanted and isinstance(arg, Tensor) else arg
        for name, arg in zip(op.parameters, args)
    ]
    return leaves, [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def backward_of(results: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Callable[[], object]:
    """Return the backward pass of a call as a function that can run again and again.

    Args:
        results: what the op's function returned: a tensor, or a tuple of tensors.
        inputs: the leaves whose gradients are computed.
        grads: the gradients of the floating results, in order. That of a result without a gradient is not used.
    """
    pairs = [(output, grad) for output, grad in zip(floating(results), grads) if output.requires_grad]
    outputs, given = [output for output, _ in pairs], [grad.to(output.dtype) for output, grad in pairs]
    return lambda: torch.autograd.grad(outputs, inputs, given, retain_graph=True, allow_unused=True)


def floating(results: Any) -> list[Tensor]:
    """Return the floating tensors among the results of a call."""
    each = cast("Sequence[Any]", results if isinstance(results, (tuple, list)) else (results,))
    return [y for y in each if isinstance(y, Tensor) and y.is_floating_point()]

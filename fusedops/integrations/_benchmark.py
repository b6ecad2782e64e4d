"""A model with and without fusedops, on the user's own machine and batch: time, memory, the largest difference."""

from __future__ import annotations

import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.profiler import ProfilerActivity, profile

from fusedops.errors import InvalidInputError

STATES = ("plain", "applied")
_SHORTEST = 0.2  # seconds of a state in a turn: short calls are repeated, since what interrupts one is longer than it


@dataclass(frozen=True)
class Benchmark:
    """The measurement of a call of a model, plain and applied. ``print`` shows it.

    Attributes:
        call: "training step" (forward and backward) or "forward".
        milliseconds: by state, "plain" and "applied", the median of the turns.
        ratio: applied divided by plain, the median of the turns: below 1, applied is faster.
        spread: the 20th and the 80th percentile of the ratio.
        peak_bytes: by state, the most memory of torch's tensors beside what was there before the call.
        difference: the largest difference between the results, in evaluation and of tokens that the attention mask
            has, divided by the largest result.
        turns: how many were measured, each of both states.
        title: of the table of what is replaced.
    """

    call: str
    milliseconds: Mapping[str, float]
    ratio: float
    spread: tuple[float, float]
    peak_bytes: Mapping[str, int]
    difference: float
    turns: int
    title: str

    def __repr__(self) -> str:
        low, high = self.spread
        rows = [
            (state, f"{self.milliseconds[state]:.1f} ms", f"{self.peak_bytes[state] / 2**20:.0f} MiB")
            for state in STATES
        ]
        lines = [f"{state:8} {took:>12} {peak:>12}" for state, took, peak in rows]
        lines.append(f"applied takes {self.ratio:.2f} of plain's time ({low:.2f} to {high:.2f} in {self.turns} turns)")
        lines.append(f"the largest difference of a result is {self.difference:.1e} of the largest result")
        return "\n  ".join([f"{self.title}; a {self.call}, with its memory:", *lines])


def benchmark(
    model: Module, batch: Any, states: Mapping[str, Callable[[], object]], title: str, seconds: float, progress: bool
) -> Benchmark:
    """Measure a call of a model in both states, in turns. ``states`` has a function that brings each state about."""
    is_step = model.training and isinstance(batch, Mapping) and "labels" in batch
    call = _call_of(model, batch, is_step)
    with ExitStack() as at_the_end:
        at_the_end.enter_context(_kept(model))
        at_the_end.callback(states["applied"])
        results, peaks = dict[str, Tensor](), dict[str, int]()
        for state in STATES:
            states[state]()
            results[state] = _result(model, batch)
            call()  # compiles, warms up
            _free_gradients(model)  # else the call frees them, and its peak is short of as much
            peaks[state] = peak_bytes(call, results[state].device.type)
        times = _in_turns(call, states, results["plain"].device.type, seconds, progress)
    ratios = [applied / plain for plain, applied in zip(times["plain"], times["applied"])]
    cuts = statistics.quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios * 9
    medians = {state: statistics.median(times[state]) * 1e3 for state in STATES}
    difference = (
        (results["applied"].double() - results["plain"].double()).abs().max() if results["plain"].numel() else 0
    )
    largest = float(results["plain"].double().abs().max()) if results["plain"].numel() else 0.0
    return Benchmark(
        "training step" if is_step else "forward",
        medians,
        statistics.median(ratios),
        (cuts[1], cuts[7]),
        peaks,
        float(difference) / max(largest, torch.finfo(torch.float64).tiny),
        len(ratios),
        title,
    )


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
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    events = [e for e in cast("Any", profiler.profiler).kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del result
    return peak


@contextmanager
def _quiet() -> Generator[None]:
    """Send the lines nowhere that torch 2.13 writes to stderr, below Python, for each profile."""
    sys.stderr.flush()
    own, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
        os.close(nowhere)


def _free_gradients(model: Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _call_of(model: Module, batch: Any, is_step: bool) -> Callable[[], Any]:
    def step() -> None:
        torch.manual_seed(0)
        _free_gradients(model)
        loss = getattr(_called(model, batch), "loss", None)
        if loss is None:
            raise InvalidInputError(
                f"benchmark: got no loss from {type(model).__name__} for labels, expected one to train with; to fix: "
                f"load the model with its head, as AutoModelForCausalLM does, or measure it in evaluation, after eval()"
            )
        loss.backward()

    def forward() -> Any:
        torch.manual_seed(0)
        with torch.no_grad():
            return _called(model, batch)

    return step if is_step else forward


def _called(model: Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**cast("Mapping[str, Any]", batch))
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _result(model: Module, batch: Any) -> Tensor:
    """Return the first floating tensor beside the loss that the model returns in evaluation, without padded tokens."""
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            output = _called(model, batch)
    finally:
        model.train(was_training)
    values: list[Any] = [output]
    if isinstance(output, (Mapping, tuple)):
        values = [*(output.values() if isinstance(output, Mapping) else cast("tuple[Any, ...]", output))]
    found = [each for each in values if isinstance(each, Tensor) and each.is_floating_point()]
    if not found:
        raise InvalidInputError(
            f"benchmark: got a result without a floating tensor from {type(model).__name__}, expected one; "
            f"to fix: give a batch with which it returns logits or hidden states"
        )
    result = next((each for each in found if each.dim()), found[0]).detach()
    seen = cast("Mapping[str, Any]", batch).get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(seen, Tensor) and result.dim() == 3 and result.shape[:2] == seen.shape:
        return result[seen.bool()]
    return result.clone()


def _in_turns(
    call: Callable[[], Any], states: Mapping[str, Callable[[], object]], device: str, seconds: float, progress: bool
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {state: [] for state in STATES}
    synchronize = torch.get_device_module(device).synchronize  # does nothing on a CPU

    def took() -> float:
        synchronize()
        started = time.perf_counter()
        call()
        synchronize()
        return time.perf_counter() - started

    fastest, repeated = dict.fromkeys(STATES, math.inf), min(_SHORTEST, seconds / 6)  # of three turns of two states
    end = time.monotonic() + seconds
    while len(times["plain"]) < 3 or (time.monotonic() < end and len(times["plain"]) < 50):
        order = STATES if len(times["plain"]) % 2 else STATES[::-1]
        for state in order:
            states[state]()
            gc.collect()
            call()
            each = [took()]
            each += [took() for _ in range(int(repeated / min(fastest[state], *each)))]
            fastest[state] = min(fastest[state], *each)
            times[state].append(statistics.median(each))
        if progress:
            left = max(0.0, end - time.monotonic())
            print(f"\r{len(times['plain'])} turns, {left:.0f} s left ", end="", file=sys.stderr, flush=True)
    if progress:
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
    return times


@contextmanager
def _kept(model: Module) -> Generator[None]:
    """Bring back the gradients of a model, its buffers and the state of torch's generators."""
    gradients = [parameter.grad for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers):
                buffer.copy_(before)

"""``fusedops bench``: each backend that serves here beside plain torch and a copy. benchmarks/ measures by it too.

A copy of the same size is the yardstick: an op that reads one tensor and writes one can be no faster, and milliseconds
are of one machine and hour.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fusedops
from fusedops import testing
from fusedops._op import OPS, Case, Op


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: the median and the 20th and 80th percentiles."""

    p50: float
    p20: float
    p80: float


def interleaved(
    work: Mapping[str, Callable[[], object]], device: str, seconds: float, idle: Callable[[], bool] | None = None
) -> dict[str, Times]:
    """Times every function in turns, so that noise hits all alike, for about ``seconds`` each.

    On a GPU each call is timed by events, with a buffer larger than any L2 cache written in between; on another
    accelerator by the clock, from one synchronization to the next. Given ``idle``, a call waits until it says yes, and
    counts only where it still does afterwards; TimeoutError where that takes a hundred times as long.
    """
    kind = torch.device(device).type
    flush = torch.empty(512 * 2**20, dtype=torch.uint8, device=device) if kind == "cuda" else None

    def one(function: Callable[[], object]) -> float:
        return _by_events(function, flush) if flush is not None else _by_the_clock(function, kind)

    def undisturbed(function: Callable[[], object], idle: Callable[[], bool]) -> float:
        while time.monotonic() < end:
            if idle():
                took = one(function)
                if idle():
                    return took
        raise TimeoutError(f"the machine is not idle: {patience:g} s were not enough for {', '.join(work)}")

    samples: dict[str, list[float]] = {}
    patience = 100 * seconds * len(work)
    end = time.monotonic() + patience
    turns = 3
    for name, function in work.items():
        function()  # warms up, compiles
        first = one(function)
        samples[name] = []
        turns = max(turns, min(50, int(seconds * 1e3 / max(first, 1e-3))))
    for _ in range(turns):
        for name, function in work.items():
            if sum(samples[name]) < seconds * 1e3 or len(samples[name]) < 5:
                samples[name].append(one(function) if idle is None else undisturbed(function, idle))
    return {name: _times(found) for name, found in samples.items()}


def _times(found: list[float]) -> Times:
    if len(found) < 2:
        return Times(found[0], found[0], found[0])
    cuts = statistics.quantiles(found, n=10, method="inclusive")
    return Times(statistics.median(found), cuts[1], cuts[7])


def _by_the_clock(function: Callable[[], object], kind: str) -> float:
    synchronize = torch.get_device_module(kind).synchronize  # does nothing on a CPU
    synchronize()
    start = time.perf_counter()
    result = function()
    synchronize()
    took = (time.perf_counter() - start) * 1e3
    del result  # after the clock has stopped: freeing is the caller's
    return took


def _by_events(function: Callable[[], object], flush: Tensor) -> float:
    flush.zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def copy_of(like: Tensor) -> Callable[[], object]:
    """``y.copy_(x)`` of a tensor's size: it moves twice the tensor's bytes."""
    source, target = torch.randn_like(like, dtype=torch.float32).to(like.dtype), torch.empty_like(like)
    return lambda: target.copy_(source)


def plain_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """The chain that models write."""
    scores = x * scale
    if causal:
        upper = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mask = upper if mask is None else mask | upper
    return torch.softmax(scores if mask is None else scores.masked_fill(mask, float("-inf")), -1)


def plain_bias_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """``F.gelu(x + bias)``."""
    return F.gelu(x if bias is None else x + bias, approximate=approximate)


def plain_bias_dropout(x: Tensor, bias: Tensor | None, p: float, training: bool, seed: Tensor | None) -> Tensor:
    """``F.dropout(x + bias)``, with torch's own random numbers."""
    return F.dropout(x if bias is None else x + bias, p, training)


def plain_bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, training: bool, seed: Tensor | None
) -> Tensor:
    """``residual + F.dropout(x + bias)``."""
    return residual + plain_bias_dropout(x, bias, p, training, seed)


# What a model runs without fused ops; op.reference is exact in float32, and no measure of speed
PLAIN: dict[str, Callable[..., Tensor]] = {
    "scaled_masked_softmax": plain_softmax,
    "bias_gelu": plain_bias_gelu,
    "bias_dropout": plain_bias_dropout,
    "bias_dropout_add": plain_bias_dropout_add,
}


def on(backend: str, op: Op) -> Callable[..., Tensor]:
    """The public function of an op on one backend, by position."""
    public, names = getattr(fusedops, op.name), op.parameters
    return lambda *args: public(**dict(zip(names, args)), backend=backend)


def refusal(backend: str, op: Op, args: tuple[Any, ...]) -> str | None:
    """Why a backend would not serve a call; None where it would."""
    decision = fusedops.explain(op.name, **dict(zip(op.parameters, args)), backend=backend)
    verdict = next(v for v in decision.candidates if v.backend == backend)
    return verdict.reasons[0].detail if verdict.reasons else None


def with_grad(args: tuple[Any, ...]) -> tuple[list[Any], list[Tensor]]:
    """A call's arguments as leaves that want gradients, and those leaves alone."""
    leaves = [
        arg.detach().clone().requires_grad_() if isinstance(arg, Tensor) and arg.is_floating_point() else arg
        for arg in args
    ]
    return leaves, [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def measure(op: Op, case: Case, dtype: torch.dtype, device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """One record for each direction and each of plain torch and the backends that take the case."""
    args = testing.arguments(op, case, dtype, device)
    found: dict[str, Callable[..., Tensor]] = {"plain torch": PLAIN[op.name]}
    for info in fusedops.backends():
        if refusal(info.name, op, args) is None:
            found[info.name] = on(info.name, op)
    leaves, inputs = with_grad(args)
    like = torch.empty_like(args[0])
    grad = torch.randn_like(like)
    outputs = {name: function(*leaves) for name, function in found.items()}
    work: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {name: (lambda f=f: f(*leaves)) for name, f in found.items()},
        "backward": {
            name: (lambda y=y: torch.autograd.grad(y, inputs, grad.to(y.dtype), retain_graph=True))
            for name, y in outputs.items()
        },
    }
    for direction, mine in work.items():
        times = interleaved({**mine, "copy": copy_of(like)}, device, seconds)
        for name in mine:
            yield {
                "op": op.name,
                "case": case.name,
                "shape": list(args[0].shape),
                "dtype": str(dtype).removeprefix("torch."),
                "device": device,
                "direction": direction,
                "who": name,
                "ms": round(times[name].p50, 5),
                "copies": round(times[name].p50 / times["copy"].p50, 2),
                "speedup": round(times["plain torch"].p50 / times[name].p50, 2),
            }


def cases(names: list[str], elements: int) -> Iterator[tuple[Op, Case]]:
    """The ops' own cases, those of all ops where none is named, with no tensor of more than ``elements``."""
    for op in OPS.values():
        if not names or op.name in names:
            yield from ((op, testing.shrunk(case, elements)) for case in op.cases)

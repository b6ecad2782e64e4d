"""Time and memory of experts beside transformers' own experts functions, in paired turns on a CPU.

    python -m benchmarks.experts                                    # 64 experts of 512 x 256, 8 for a token
    python -m benchmarks.experts --sizes 8 2 1024 2048 --tokens 1 --modes forward
    MALLOC_MMAP_THRESHOLD_=65536 python -m benchmarks.experts --memory

In each turn every function runs once, and the order changes from turn to turn. The time is the process's on its cores,
which other processes change less than the time of a clock. ``--wall`` is for an idle machine: the time is that of a
clock, of the second of two calls, since a thread that waited for work has to wake. ``batched_mm`` copies the weights of
each choice: it is left out where the copies take more than 2 GB. ``--memory`` prints what each adds to the memory of
the process at most, and what it saves for the backward pass, and no times (Linux).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import fusedops
from benchmarks.idle import exp2_ns
from benchmarks.memory import resident_peak_bytes, saved_bytes

PEERS = ("eager", "batched_mm", "grouped_mm")
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def functions(experts: int, width: int, inner: int, dtype: torch.dtype) -> tuple[dict[str, Function], list[Tensor]]:
    """Return the functions of (x, index, weights), all with the same weights of the experts, and these weights."""
    config: Any = MixtralConfig(hidden_size=width, intermediate_size=inner, num_local_experts=experts)
    module: Any = MixtralExperts(config).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)

    def ours(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return fusedops.experts(x, index, weights, module.gate_up_proj, module.down_proj)

    def theirs(x: Tensor, index: Tensor, weights: Tensor, name: str) -> Tensor:
        config._experts_implementation = name
        return module(x, index, weights)

    peers: dict[str, Function] = {name: lambda *args, name=name: theirs(*args, name=name) for name in PEERS}
    return {"fusedops": ours, **peers}, [*module.parameters()]


def main() -> None:
    """Print the differences and the ratios of the times in each turn, or the peaks of the memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs=4, default=(64, 8, 512, 256), metavar=("E", "K", "H", "I"))
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 64, 2048))
    parser.add_argument("--modes", nargs="+", choices=("forward", "both"), default=("forward", "both"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--wall", action="store_true", help="the time of a clock, not of the processor")
    parser.add_argument("--memory", action="store_true", help="the peaks of the memory alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype, (experts, choices, width, inner) = getattr(torch, options.dtype), options.sizes
    every, parameters = functions(experts, width, inner, dtype)
    print(f"E, K, H, I = {options.sizes}, {options.dtype}, {options.threads} threads, torch {torch.__version__}")
    for tokens in options.tokens:
        x = torch.randn(tokens, width).to(dtype).requires_grad_()
        values, index = torch.topk(torch.rand(tokens, experts).softmax(-1), choices)
        copies = 3 * tokens * choices * width * inner * dtype.itemsize
        run = {name: every[name] for name in every if name != "batched_mm" or copies < 2e9}
        for mode in options.modes:
            print(f"{tokens} tokens, {mode}: exp2 takes {exp2_ns():.2f} ns")
            args = (x, index, values.to(dtype))
            call = partial(_call, args, parameters, mode == "both")
            if options.memory:
                for name, function in run.items():
                    call(function)
                    peak = resident_peak_bytes(partial(call, function)) / 2**20
                    saved = saved_bytes(partial(function, *args), [*args, *parameters]) / 2**20
                    print(f"  {name:10} {peak:.0f} MiB, {saved:.0f} of them saved for backward", flush=True)
            else:
                _measure(run, call, options.turns, options.wall)


def _call(args: tuple[Tensor, Tensor, Tensor], parameters: list[Tensor], both: bool, function: Function) -> Tensor:
    with torch.set_grad_enabled(both):
        y = function(*args)
    if both:
        torch.autograd.grad(y, [args[0], *parameters], torch.ones_like(y))
    return y.detach()


def _measure(run: dict[str, Function], call: Callable[[Function], Tensor], turns: int, wall: bool) -> None:
    clock = time.perf_counter if wall else time.process_time
    wanted = call(run["eager"]).double()
    times: dict[str, list[float]] = {name: [] for name in run}
    for turn in range(turns + 1):
        for name in list(run) if turn % 2 else reversed(run):
            if wall:
                call(run[name])
            started = clock()
            call(run[name])
            if turn:  # the first is a warm-up
                times[name].append(clock() - started)
    for name, function in run.items():
        worst = float((call(function).double() - wanted).norm() / wanted.norm())
        ratios = [one / other for one, other in zip(times[name], times["fusedops"])]
        middle, each = statistics.median(times[name]), " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"  {name:10} {middle * 1e3:8.2f} ms, {statistics.median(ratios):.2f} of ours; turns {each}")
        print(f"  {'':10} off by {worst:.1e}", flush=True)


if __name__ == "__main__":
    main()

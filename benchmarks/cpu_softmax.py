"""Measures the eager softmax kernels on a CPU, as multiples of ``y.copy_(x)`` and against the naive form.

    GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592 \
        python benchmarks/cpu_softmax.py [--dtype bfloat16] [--repeat 7] [--threads 2]

Everything is timed in turn, and the turns repeated: on a shared machine only ratios within one run mean something.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fusedops_eager._softmax import softmax_backward, softmax_forward  # noqa: TID251

SCALE = 0.125


def naive(x: Tensor, mask: Tensor | None, scale: float = SCALE) -> Tensor:
    scores = x * scale
    return torch.softmax(scores if mask is None else scores.masked_fill(mask, float("-inf")), -1)


def measure(work: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeat + 1):
        for name, function in work.items():
            start = time.perf_counter()
            result = function()
            if turn:  # the first warms up
                times[name].append(time.perf_counter() - start)
            del result
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", type=int, nargs=4, default=[4, 16, 512, 1024])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    b, h, sq, sk = args.shape
    x, grad = torch.randn(b, h, sq, sk).to(dtype), torch.randn(b, h, sq, sk).to(dtype)
    y, copy = torch.softmax(x, -1), torch.empty_like(x)
    triangle = torch.ones(sq, sk, dtype=torch.bool).triu(1)
    shapes = {
        "b1qk": (b, 1, sq, sk),
        "11qk": (1, 1, sq, sk),
        "b11k": (b, 1, 1, sk),
        "qk": (sq, sk),
        "full": (b, h, sq, sk),
    }
    masks = {name: torch.rand(shape) < 0.5 for name, shape in shapes.items()}
    padded = torch.zeros(b, 1, sq, sk, dtype=torch.bool)  # a quarter of the queries see nothing
    padded[:, :, sq * 3 // 4 :] = True
    masks["padded"] = padded
    dirty = x.clone().masked_fill_(masks["b1qk"], float("nan"))
    dirty_mask = masks["b1qk"]
    leaf = x.clone().requires_grad_()
    graph = naive(leaf, masks["b1qk"])

    work: dict[str, Callable[[], object]] = {"copy": lambda: copy.copy_(x)}
    with torch.no_grad():
        for name, mask in masks.items():
            work[f"forward {name}: naive"] = lambda mask=mask: naive(x, mask)
            work[f"forward {name}"] = lambda mask=mask: softmax_forward(x, mask, SCALE, False)
        work["forward no mask: naive"] = lambda: naive(x, None)
        work["forward no mask"] = lambda: softmax_forward(x, None, SCALE, False)
        work["forward causal: naive"] = lambda: naive(x, triangle)
        work["forward causal"] = lambda: softmax_forward(x, None, SCALE, True)
        work["forward causal b1qk: naive"] = lambda: naive(x, triangle | masks["b1qk"])
        work["forward causal b1qk"] = lambda: softmax_forward(x, masks["b1qk"], SCALE, True)
        work["forward scale 0.088 b1qk"] = lambda: softmax_forward(x, masks["b1qk"], 0.088, False)
        work["forward NaN under the mask"] = lambda: softmax_forward(dirty, dirty_mask, SCALE, False)
        work["backward"] = lambda: softmax_backward(grad, y, SCALE, False)
    work["backward: autograd of naive"] = lambda: torch.autograd.grad(graph, leaf, grad, retain_graph=True)

    medians = measure(work, args.repeat)
    print(f"{args.shape} {args.dtype}, {args.threads} threads, torch {torch.__version__}: median of {args.repeat}")
    for name, seconds in medians.items():
        slow = medians.get(f"{name}: naive", medians.get(f"{name}: autograd of naive"))
        faster = "" if slow is None else f"{slow / seconds:6.2f} times faster"
        print(f"{name:32}{seconds * 1e3:9.2f} ms {seconds / medians['copy']:7.2f} copies {faster}")


if __name__ == "__main__":
    main()

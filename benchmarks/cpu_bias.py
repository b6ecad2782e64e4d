"""Measures the eager kernels of bias_gelu, bias_dropout and bias_dropout_add on a CPU, as multiples of ``y.copy_(x)``
and against the chain of torch calls that they replace.

    GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592 \
        python benchmarks/cpu_bias.py [--dtype bfloat16] [--repeat 7] [--threads 2]

Everything is timed in turn, and the turns repeated: on a shared machine only ratios within one run mean something. The
fastest turn is the one least disturbed; ``--cpu-time`` with ``--threads 1`` counts what the process itself used, which
a busy machine disturbs least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fusedops_eager._dropout import dropout_backward, dropout_forward  # noqa: TID251
from fusedops_eager._gelu import gelu_backward, gelu_forward  # noqa: TID251

P = 0.1


def measure(work: dict[str, Callable[[], object]], repeat: int, cpu_time: bool) -> dict[str, list[float]]:
    clock = time.process_time if cpu_time else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeat + 1):
        for name, function in work.items():
            start = clock()
            result = function()
            if turn:  # the first warms up
                times[name].append(clock() - start)
            del result
    return times


def gradient(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, bias: Tensor, grad: Tensor) -> object:
    """A call that runs only the backward of ``function``."""
    leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
    y = function(*leaves)
    return lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", type=int, nargs=2, default=[8192, 4096])
    parser.add_argument("--only", default="", help="measure only what has this in its name")
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    x, grad, residual = (torch.randn(args.shape).to(dtype) for _ in range(3))
    bias, copy, seed = torch.randn(args.shape[1]).to(dtype), torch.empty_like(x), torch.tensor([1234567890123])
    both = (True, True)

    chains: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    for form in ("tanh", "none"):
        chains[f"bias_gelu {form} forward"] = (
            lambda form=form: gelu_forward(x, bias, form),
            lambda form=form: functional.gelu(x + bias, approximate=form),
        )
        chains[f"bias_gelu {form} backward"] = (
            lambda form=form: gelu_backward(grad, x, bias, form, both),
            gradient(lambda x, bias, form=form: functional.gelu(x + bias, approximate=form), x, bias, grad),
        )
    chains["bias_dropout forward"] = (
        lambda: dropout_forward(x, bias, None, P, True, seed),
        lambda: functional.dropout(x + bias, P),
    )
    chains["bias_dropout_add forward"] = (
        lambda: dropout_forward(x, bias, residual, P, True, seed),
        lambda: residual + functional.dropout(x + bias, P),
    )
    chains["bias_dropout_add forward, evaluation"] = (
        lambda: dropout_forward(x, bias, residual, P, False, None),
        lambda: residual + (x + bias),
    )
    chains["bias_dropout backward"] = (
        lambda: dropout_backward(grad, seed, bias, P, True, dtype, both),
        gradient(lambda x, bias: functional.dropout(x + bias, P), x, bias, grad),
    )
    work: dict[str, Callable[[], object]] = {"copy": lambda: copy.copy_(x)}
    for name, (ours, chain) in chains.items():
        if args.only in name:
            work[name], work[f"{name}: chain"] = ours, chain
    times = measure(work, args.repeat, args.cpu_time)
    print(f"{args.shape} {args.dtype}, {args.threads} threads, torch {torch.__version__}: of {args.repeat} turns")
    print(f"{'':48}{'fastest: ms':>12}{'copies':>8}{'faster':>8}{'median: ms':>14}{'copies':>8}{'faster':>8}")
    for name, seconds in times.items():
        chain = times.get(f"{name}: chain")
        line = f"{name:48}"
        for best in (min, statistics.median):
            line += f"{best(seconds) * 1e3:12.1f}{best(seconds) / best(times['copy']):8.2f}"
            line += f"{best(chain) / best(seconds):8.2f}  " if chain else " " * 10
        print(line)


if __name__ == "__main__":
    main()

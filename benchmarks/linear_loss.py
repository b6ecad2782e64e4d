"""Time and memory of a linear layer's losses beside torch's chain, forward and backward, in paired turns.

    python -m benchmarks.linear_loss                          # [4096, 512] x [32000, 512], float32, on the CPU
    python -m benchmarks.linear_loss --op linear_log_probs
    python -m benchmarks.linear_loss --rows 8192 --size 4096 --classes 128256 --dtype bfloat16 --device cuda

In each turn all run once, and the order changes from turn to turn: on a busy machine a ratio of one turn is nearer to
the truth than a ratio of two times of different minutes. torch's own chunked function runs too, from torch 2.13 on, and
installed peers where they support the device. "products" are torch's matrix products alone, which no implementation can
do without: the logits and the two gradients, and for linear_log_probs, whose backward has a gradient for each row, the
logits a second time, as they are not kept. ``--of-process`` measures the processor time of all threads, which other
programs disturb less: threads that wait must sleep then, by ``OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

import fusedops
from benchmarks.memory import peak_bytes
from benchmarks.peers import liger_linear_loss, quack_linear_loss

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def torch_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Compute the loss from the logits of all rows."""
    return cross_entropy(x @ weight.t(), target)


def torch_log_probs(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Compute the sum of the log probabilities of the targets from the logits of all rows."""
    return log_softmax(x @ weight.t(), -1).gather(-1, target[:, None]).sum()


def log_probs(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Compute the same with the op."""
    return fusedops.linear_log_probs(x, weight, target).sum()


def torchs_own() -> Loss:
    """Return torch's function that has the logits of a chunk at a time."""
    torch_nn: Any = torch.nn  # torch before 2.13 has none
    options = torch_nn.LinearCrossEntropyOptions()
    return lambda x, weight, target: torch_nn.functional.linear_cross_entropy(x, weight, target, options=options)


PEERS: dict[str, Callable[[], Loss]] = {
    "torch's own": torchs_own,
    "liger-kernel": liger_linear_loss,
    "quack-kernels": quack_linear_loss,
}


OPS: dict[str, dict[str, Loss]] = {
    "linear_cross_entropy": {"torch": torch_loss, "fusedops": fusedops.linear_cross_entropy},
    "linear_log_probs": {"torch": torch_log_probs, "fusedops": log_probs},
}


def products(x: Tensor, weight: Tensor, logits: int) -> tuple[Tensor, ...]:
    """Return what has the shapes of the gradients, after computing the logits so many times."""
    with torch.no_grad():
        for _ in range(logits):
            gradient = x @ weight.t()
        return gradient @ weight, gradient.t() @ x


def both_ways(loss: Loss, x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """Run forward and backward; return the gradients."""
    x.grad = weight.grad = None
    loss(x, weight, target).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return x.grad, weight.grad


def seconds(run: Callable[[], object], device: str, clock: Callable[[], float]) -> float:
    """Return the time of a call."""
    wait = (lambda: None) if device == "cpu" else torch.get_device_module(device).synchronize
    wait()
    start = clock()
    run()
    wait()
    return clock() - start


def main() -> None:
    """Print memory, and the ratio of the times in each turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=OPS, default="linear_cross_entropy")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--classes", type=int, default=32000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--of-process", action="store_true")
    options = parser.parse_args()
    clock = time.process_time if options.of_process else time.perf_counter
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    given = {"dtype": getattr(torch, options.dtype), "device": options.device}
    x = torch.randn(options.rows, options.size, **given).requires_grad_()
    weight = (torch.randn(options.classes, options.size, **given) / options.size**0.5).requires_grad_()
    target = torch.randint(options.classes, (options.rows,), device=options.device)
    functions = dict(OPS[options.op])
    peers = PEERS if options.device == "cuda" else {"torch's own": torchs_own}
    for name, load in peers.items() if options.op == "linear_cross_entropy" else ():
        try:
            functions[name] = load()
        except Exception as error:  # the peer is not installed
            print(f"{name}: left out, {type(error).__name__}: {error}")
    runs = {
        name: lambda function=function: both_ways(function, x, weight, target) for name, function in functions.items()
    }
    logits = options.rows * options.classes * x.element_size()
    print(f"logits {logits / 1e6:.0f} MB, x {x.nbytes / 1e6:.1f} MB, weight {weight.nbytes / 1e6:.1f} MB")
    for name, run in runs.items():
        beyond = peak_bytes(run, options.device)
        x.grad = weight.grad = None
        beyond -= x.nbytes + weight.nbytes
        print(
            f"{name}: {beyond / 1e6:.1f} MB beyond inputs and gradients, 1/{logits / max(beyond, 1):.1f} of the logits"
        )
    runs["products"] = lambda: products(x, weight, 1 if options.op == "linear_cross_entropy" else 2)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.turns + 1):
        order = list(runs.items())
        for name, run in order if turn % 2 else reversed(order):
            took = seconds(run, options.device, clock)
            if turn:  # the first is a warm-up
                times[name].append(took)
    for name in runs:
        ratios = [one / other for one, other in zip(times[name], times["torch"])]
        each = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"{name}: {statistics.median(times[name]):.3f} s, {statistics.median(ratios):.2f} of torch's; turns {each}"
        )


if __name__ == "__main__":
    main()

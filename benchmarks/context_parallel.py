"""``python -m benchmarks.context_parallel``: attention over a sequence that two processes share, beside one process.

Each process has one thread. Printed is the processor time of each rank in proportion to that of one process that makes
the whole call, in turns: the median of five, after a first one. With ``--wall`` the time on the clock, which needs an
idle machine with a processor for each rank.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fusedops

CALLS: dict[str, tuple[int, dict[str, Any]]] = {
    "nothing masked": (4096, {}),
    "causal": (4096, {"causal": True}),
    "causal, window 512": (8192, {"causal": True, "window": (511, 0)}),
}


def seconds(tensors: Sequence[Tensor], options: dict[str, Any], gradient: bool, clock: Callable[[], float]) -> float:
    """Return the time of a call on this rank, from where all ranks begin."""
    distributed.barrier()
    start = clock()
    y = fusedops.attention(*tensors, **options)
    if gradient:
        torch.autograd.grad(y, tensors, torch.ones_like(y))
    return clock() - start


def rank(number: int, ranks: int, port: int, wall: bool) -> None:
    """Measure the calls on one of the processes."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(number), WORLD_SIZE=str(ranks))
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (ranks,))
    clock = time.perf_counter if wall else time.process_time
    for name, (length, options) in CALLS.items():
        whole = [torch.randn(1, 4, length, 64).requires_grad_() for _ in range(3)]
        parts: list[DTensor] = [distribute_tensor(each.detach(), mesh, [Shard(2)]).requires_grad_() for each in whole]
        for gradient in (False, True):
            ratios: list[Tensor] = []
            for _ in range(6):
                own = torch.zeros(ranks)
                own[number] = seconds(parts, options, gradient, clock)
                distributed.all_reduce(own)
                one = torch.zeros(())
                if number == 0:
                    start = clock()
                    y = fusedops.attention(*whole, **options)
                    if gradient:
                        torch.autograd.grad(y, whole, torch.ones_like(y))
                    one += clock() - start
                ratios.append(own / one)
            if number == 0:
                medians = [statistics.median(float(each[at]) for each in ratios[1:]) for at in range(ranks)]
                text = ", ".join(f"{each:.2f}" for each in medians)
                print(f"{name:20} {'both' if gradient else 'forward':8} {text}", flush=True)
    distributed.destroy_process_group()


def main() -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_parallel", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--wall", action="store_true")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(rank, (options.ranks, port, options.wall), nprocs=options.ranks)


if __name__ == "__main__":
    main()

"""Threads that run together."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

import fusedops

OP = "scaled_masked_softmax"

softmax = fusedops.scaled_masked_softmax

X = torch.ones(2, 4)

MANY = 16


def together(work: Callable[[int], None], count: int = MANY) -> None:
    """Run ``work(0)`` ... in threads that begin at once; an error of one of them is raised here."""
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(n: int) -> None:
        try:
            barrier.wait(30)
            work(n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]

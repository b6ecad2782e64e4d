"""Another thread writes the numbers by which a kernel finds memory, during calls, in a process of its own.

What such a call returns is of no number, or it raises; but no memory is read or written that is not a tensor's. With
the sanitizers (test_sanitizers.py) each such access ends the process, else only those far away.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fusedops

FAR = 2**40
ROWS = 20_000


class Writing(NamedTuple):
    """What is written during calls.

    Attributes:
        call: returns what is differentiated, and the tensor that is written.
        contents: what the tensor is to hold in turn, between times the first: a number of each element, or a list.
    """

    call: Callable[[], tuple[Tensor, Tensor]]
    contents: list[Any]


def of_bounds(op: Callable[..., Tensor], *args: Tensor) -> Writing:
    """Return calls on sequences of 4,096 positions."""
    bounds = torch.tensor([0, 1000, 2000, 4096])
    far = [[0, FAR, 2 * FAR, 3 * FAR], [FAR] * 4, [4096, 2000, 1000, 0], [-FAR, 0, 1, 2]]
    return Writing(lambda: (op(*args, bounds), bounds), [[0, 1000, 2000, 4096], *far])


def of_numbers(op: Callable[[Tensor], Tensor], shape: tuple[int, ...], *contents: int) -> Writing:
    numbers = torch.zeros(shape, dtype=torch.int64)
    return Writing(lambda: (op(numbers), numbers), [0, *contents])


def conv(channels_last: bool) -> Writing:
    x = torch.randn(1, 4096, 64).mT if channels_last else torch.randn(1, 64, 4096)
    op = lambda x, weight, bounds: fusedops.causal_conv1d(x, weight, cu_seqlens=bounds)  # noqa: E731
    return of_bounds(op, x.requires_grad_(), torch.randn(64, 4, requires_grad=True))


def linear_attention() -> Writing:
    q, k, v = (torch.randn(1, 4096, 2, 8, requires_grad=True) for _ in range(3))
    return of_bounds(lambda q, k, v, bounds: fusedops.linear_attention(q, k, v, cu_seqlens=bounds), q, k, v)


def varlen_attention() -> Writing:
    q, k, v = (torch.randn(4096, 2, 8, requires_grad=True) for _ in range(3))
    return of_bounds(lambda q, k, v, bounds: fusedops.varlen_attention(q, k, v, bounds, window=(8, 0)), q, k, v)


def experts() -> Writing:
    x, weights = torch.randn(ROWS, 1, requires_grad=True), torch.rand(ROWS, 2, requires_grad=True)
    up, down = torch.randn(8, 2, 1, requires_grad=True), torch.randn(8, 1, 1, requires_grad=True)
    return of_numbers(lambda index: fusedops.experts(x, index, weights, up, down), (ROWS, 2), 7, -1, FAR, -FAR)


def routing(given: bool) -> Writing:
    logits = torch.randn(ROWS, 16, requires_grad=True)
    if given:
        op = lambda index: fusedops.top_k_routing(logits, 2, index=index)[0]  # noqa: E731
        return of_numbers(op, (ROWS, 2), 15, FAR, -FAR)
    return Writing(lambda: fusedops.top_k_routing(logits, 2), [0, 15, FAR, -FAR])


def losses(op: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Writing:
    args = [torch.randn(shape, requires_grad=True) for shape in shapes]
    return of_numbers(lambda target: op(*args, target), shapes[0][:1], 15, -100, FAR, -FAR)


def masks(op: Callable[..., Tensor], *shape: int) -> Writing:
    args = [torch.randn(shape, requires_grad=True) for _ in range(1 if op is fusedops.scaled_masked_softmax else 3)]
    mask = torch.zeros(shape[-2], shape[-2], dtype=torch.bool)
    mask = mask if op is fusedops.attention else mask[:, : shape[-1]]
    return Writing(lambda: (op(*args, mask), mask), [0, 1])


WRITINGS: dict[str, Callable[[], Writing]] = {
    "causal_conv1d": partial(conv, False),
    "causal_conv1d by channel": partial(conv, True),
    "linear_attention": linear_attention,
    "varlen_attention": varlen_attention,
    "experts": experts,
    "top_k_routing of an index": partial(routing, True),
    "top_k_routing of its choice": partial(routing, False),
    "cross_entropy": partial(losses, fusedops.cross_entropy, (ROWS, 16)),
    "linear_cross_entropy": partial(losses, fusedops.linear_cross_entropy, (ROWS, 4), (16, 4)),
    "linear_log_probs": partial(losses, fusedops.linear_log_probs, (ROWS, 4), (16, 4)),
    "scaled_masked_softmax": partial(masks, fusedops.scaled_masked_softmax, 4, 300, 300),
    "attention": partial(masks, fusedops.attention, 1, 2, 300, 16),
}


def write(contents: list[Any], to: list[Tensor]) -> None:
    first, *others = [torch.tensor(each) for each in contents]
    while to:
        for value in others:
            for each in to[:1]:  # without a version, as another library writes
                each.data.copy_(first)
                each.data.copy_(value)


def run(name: str, seconds: float) -> None:
    """Call for so many seconds, and three times at least, while a thread writes."""
    call, contents = WRITINGS[name]()
    _, written = call()
    to = [written]
    writer = threading.Thread(target=write, args=(contents, to))
    writer.start()
    end, calls = time.monotonic() + seconds, 0
    while time.monotonic() < end or calls < 3:
        calls += 1
        try:
            result, to[0] = call()
            result.sum().backward()
        except fusedops.InvalidInputError:
            pass
    to.clear()
    writer.join()


@pytest.mark.usefixtures("on_cpu")
def test_numbers_are_read_once() -> None:
    command, perturbed = [sys.executable, __file__, "0.2"], {**os.environ, "MALLOC_PERTURB_": "165"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=perturbed)
    assert done.returncode == 0, f"signal or error {done.returncode} in {done.stdout.splitlines()[-1:]}: {done.stderr}"
    assert done.stdout.splitlines() == [*WRITINGS, "done"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)
    for name in WRITINGS:
        print(name, flush=True)
        with fusedops.use("cpu", fallback="raise"):
            run(name, float(sys.argv[1]))
    print("done", flush=True)

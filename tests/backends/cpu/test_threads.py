"""Threads: results do not depend on their number, torch's setting is obeyed, the GIL is released."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from cpu_values import CALLS, call_of
from pairwise import pairwise
from right import both_ways

import fusedops

pytestmark = pytest.mark.usefixtures("on_cpu", "one_thread")


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    pairwise([*CALLS], [(700, 511), (3, 50_000), (40_000, 7)], [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_bits_are_equal_for_any_number(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    op, args, options = call_of(name, shape, dtype)
    torch.set_num_threads(1)
    wanted = both_ways(op, *args, **options)
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        got = both_ways(op, *args, **options)
        assert all(torch.equal(got[key], value) for key, value in wanted.items()), count


def test_callers_side_by_side_do_not_disturb_each_other() -> None:
    args = torch.randn(300, 511), torch.randn(511)
    wanted = both_ways("bias_gelu", *args)
    wrong: list[int] = []

    def call(number: int) -> None:
        with fusedops.use("cpu", fallback="raise"):
            for _ in range(5):
                if not all(map(torch.equal, both_ways("bias_gelu", *args).values(), wanted.values())):
                    wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(16)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_the_gil_is_released() -> None:
    torch.set_num_threads(1)
    x = torch.randn(4096, 4096)
    started, done = threading.Event(), threading.Event()

    def call() -> None:
        started.set()
        for _ in range(4):
            fusedops.bias_gelu(x, backend="cpu")
        done.set()

    caller = threading.Thread(target=call)
    caller.start()
    started.wait()
    turns = 0
    while not done.is_set():  # a turn of a caller that held the GIL for a whole kernel would take 10 ms or more
        time.sleep(0.001)
        turns += 1
    caller.join()
    assert turns > 4 * 2

"""Threads and tasks: each sees its own policy."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from thread_cases import MANY, OP, X, softmax, together

import fusedops


@pytest.fixture
def many(fakes: Any) -> list[str]:
    """Backends b0 ... b15; what bN gives is N everywhere."""
    for n in range(MANY):
        fakes(f"b{n}", run=lambda x, *rest, n=n, **more: torch.full_like(x, float(n)), priority=-50 - n)
    return [f"b{n}" for n in range(MANY)]


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads that change places as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def who() -> int:
    """The number of the backend that serves here, by a call; -1 for eager, whose softmax sums to 1."""
    value = float(softmax(X)[0, 0])
    return -1 if value == 0.25 else int(value)


def test_16_threads_with_different_policies_see_only_their_own(many: list[str], switching: None) -> None:
    def work(n: int) -> None:
        order = random.Random(n)
        for _ in range(20):
            assert who() == -1
            with fusedops.use(many[n]):
                assert who() == n
                inner = order.randrange(MANY)
                with fusedops.use(many[inner]):
                    assert who() == inner
                    assert fusedops.explain(OP, X).backend == many[inner]
                with fusedops.use(f"bias_gelu={many[inner]}", fallback="silent"):
                    assert who() == n
                assert who() == n
                assert int(softmax(X, backend=many[inner])[0, 0]) == inner
            x = X.clone().requires_grad_()
            with fusedops.use(many[n]):
                y = softmax(x)
            y.sum().backward()
            assert fusedops.explain(OP, X, backend=many[n]).backward == many[n]

    together(work)


def test_threads_while_the_policy_of_the_process_and_the_backends_change(many: list[str], switching: None) -> None:
    done = threading.Event()

    def change() -> None:
        made = fusedops.Backend("passing", ("cpu",), -99, ())
        while not done.is_set():
            for name in many[:3]:
                fusedops.set_policy(name)
            fusedops.register(made)
            fusedops.unregister("passing")

    changing = threading.Thread(target=change)
    changing.start()

    def work(n: int) -> None:
        for _ in range(20):
            assert who() in (-1, 0, 1, 2)
            with fusedops.use(many[n]):
                assert who() == n

    try:
        together(work)
    finally:
        done.set()
        changing.join(30)
        fusedops.set_policy(None)


def test_1000_tasks_with_different_policies_see_only_their_own(many: list[str]) -> None:
    async def work(n: int) -> None:
        mine, other = n % MANY, (n * 7 + 3) % MANY
        await asyncio.sleep(0)
        assert who() == 5, "what was around the tasks"
        with fusedops.use(many[mine]):
            for _ in range(3):
                await asyncio.sleep(0)
                assert who() == mine
            with fusedops.use(many[other]):
                await asyncio.sleep(0.001 * (n % 5))
                assert who() == other
                inside = asyncio.create_task(child(other))
            assert who() == mine
            assert await asyncio.to_thread(who) == mine
            await inside
        assert who() == 5

    async def child(inherited: int) -> None:
        await asyncio.sleep(0)
        assert who() == inherited

    async def all_of_them() -> None:
        with fusedops.use(many[5]):
            await asyncio.gather(*map(work, range(1000)))
        assert who() == -1

    asyncio.run(all_of_them())

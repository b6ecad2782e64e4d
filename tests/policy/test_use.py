"""use() and set_policy(): blocks, decorators, threads and tasks."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from policy_cases import OP, OTHER, preferences, who

import fusedops

pytestmark = pytest.mark.usefixtures("no_compiled_backend")


def test_use_gives_the_policy_and_ends_with_its_block_also_by_an_error() -> None:
    with fusedops.use("eager") as policy:
        assert policy is fusedops.get_policy()
        assert policy.order(OP) == ("eager",)

    def fail() -> None:
        with fusedops.use("triton"):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert preferences() == []


def test_use_as_a_decorator_recursively() -> None:
    @fusedops.use("triton")
    def chosen(depth: int = 2) -> list[str | None]:
        """Return who."""
        return [who(), *(chosen(depth - 1) if depth else [])]

    assert chosen() == ["triton"] * 3
    assert chosen.__doc__ == "Return who."
    assert who() == "eager"


def test_use_on_a_coroutine_function_lasts_while_it_runs() -> None:
    @fusedops.use("triton")
    async def chosen() -> str | None:
        await asyncio.sleep(0)
        return who()

    assert asyncio.run(chosen()) == "triton"


def test_a_generator_function_cannot_be_decorated() -> None:
    def numbers() -> Any:
        yield who()

    async def later() -> Any:
        yield who()

    for function in (numbers, later):
        with pytest.raises(TypeError, match=rf"use\(\): got {function.__name__}, a generator, .*; to fix: put `with"):
            fusedops.use("triton")(function)


def test_set_policy_inside_a_use_block_is_seen() -> None:
    with fusedops.use(f"{OTHER}=eager"):
        assert who() == "eager"
        fusedops.set_policy("triton")
        assert who() == "triton"
        with fusedops.use(fallback="silent"):
            assert who() == "triton"
            fusedops.set_policy("eager")
            assert who() == "eager"
        fusedops.set_policy(None)
        assert preferences() == []


def test_set_policy_is_seen_by_every_thread() -> None:
    seen: list[str | None] = []
    fusedops.set_policy("triton")
    thread = threading.Thread(target=lambda: seen.append(who()))
    thread.start()
    thread.join()
    assert seen == ["triton"]

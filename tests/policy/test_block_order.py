"""Blocks that end out of order: each error names both blocks, and no other block changes."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from policy_cases import who

import fusedops
from fusedops import PolicyError
from fusedops._policy import context

pytestmark = pytest.mark.usefixtures("no_compiled_backend")


def rows() -> Iterator[str | None]:
    with fusedops.use("triton"):
        yield who()
        yield who()


def test_a_generator_that_is_closed_inside_another_block_does_not_end_that_block() -> None:
    generator = rows()
    assert next(generator) == "triton"
    with fusedops.use("eager", fallback="raise"):
        with pytest.raises(PolicyError) as error:
            generator.close()  # type: ignore[attr-defined]
        assert who() == "eager"
        assert fusedops.get_policy().fallback == "raise"
    here = __file__
    text = str(error.value)
    assert text.startswith(f"got the end of use('triton') of {here}:")
    assert f" inside use('eager') of {here}:" in text
    assert f", expected use('eager') of {here}:" in text
    assert text.endswith(
        " to end first; to fix: nest the two blocks, and close a generator before the block around it ends"
    )
    assert fusedops.get_policy().sources == (), "the block that ended out of order is gone"


def test_a_generator_that_is_closed_in_another_thread_does_not_end_a_block_there() -> None:
    seen: list[Any] = []
    generator = rows()
    next(generator)

    def work() -> None:
        with fusedops.use("eager"):
            try:
                generator.close()  # type: ignore[attr-defined]
            except PolicyError as error:
                seen.append(str(error))
            seen.append(who())
        seen.append(fusedops.get_policy().sources)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    text, inside, after = seen
    assert text.startswith("got the end of use('triton') of ")
    assert " in a thread, task or generator where it was not entered (in effect here: use('eager') of " in text
    assert text.endswith("), expected it where it was entered; to fix: use one `with` statement")
    assert (inside, after) == ("eager", ())


def test_a_generator_that_is_collected_in_another_thread_does_not_end_a_block_there() -> None:
    hold = [rows()]
    next(hold[0])
    seen: list[Any] = []

    def work() -> None:
        with fusedops.use("eager"):
            hold.clear()
            gc.collect()
            seen.append(who())

    with pytest.MonkeyPatch.context() as patch:
        unraisable: list[Any] = []
        patch.setattr("sys.unraisablehook", lambda args: unraisable.append(args.exc_value))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == ["eager"]
    assert [type(error) for error in unraisable] == [PolicyError]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_task_that_leaves_an_async_generator_early_can_close_it() -> None:
    async def stream() -> Any:
        with fusedops.use("triton"):
            while True:
                yield who()

    async def main() -> list[str | None]:
        generator = stream()
        name = await anext(generator)
        inside = who()  # the generator's block is in effect in this task until it is closed
        await generator.aclose()
        return [name, inside, who()]

    assert asyncio.run(main()) == ["triton", "triton", "eager"]


def test_a_task_that_leaves_an_async_generator_early_has_its_own_policy_once_the_loop_closes_it() -> None:
    async def policies() -> AsyncIterator[str]:
        with fusedops.use("triton"):
            while True:
                yield str(fusedops.get_policy())

    async def main() -> tuple[str, str]:
        generator = policies()
        inside = await anext(generator)
        del generator
        gc.collect()
        await asyncio.sleep(0.05)  # the loop closes the generator in another task
        return inside, str(fusedops.get_policy())

    inside, after = asyncio.run(main())
    assert "triton" in inside
    assert "triton" not in after


def test_blocks_that_end_in_the_wrong_order() -> None:
    outer, inner = fusedops.use("triton"), fusedops.use("eager")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(PolicyError, match=r"^got the end of use\('triton'\) of .* inside use\('eager'\) of "):
        outer.__exit__(None, None, None)
    assert who() == "eager", "the inner block stays in effect"
    inner.__exit__(None, None, None)
    assert fusedops.get_policy().sources == ()


def test_a_block_that_ends_twice_or_was_never_entered() -> None:
    block = fusedops.use("triton")
    for _ in range(2):
        with pytest.raises(PolicyError, match=r"^got the end of use\('triton'\) of .*\(in effect here: no block\), "):
            block.__exit__(None, None, None)
        with block:
            assert who() == "triton"


def test_verify_blocks_are_blocks_too() -> None:
    checked = fusedops.verify("reference")
    checked.__enter__()
    with fusedops.use("triton"), pytest.raises(PolicyError) as error:
        checked.__exit__(None, None, None)
    text = str(error.value)
    assert text.startswith("got the end of verify(against='reference', every=1) inside use('triton') of ")
    assert fusedops.get_policy().sources == ()
    assert not context.watching, "a bound function looks for no block that compares results"


def test_a_reset_ends_a_verify_block() -> None:
    fusedops.verify("reference").__enter__()
    assert context.watching
    context.reset()
    assert not context.watching


def test_one_block_object_entered_twice_ends_twice() -> None:
    block = fusedops.use("triton")
    with block:
        with block, fusedops.use("eager"):
            assert who() == "eager"
        assert who() == "triton"
    assert who() == "eager"
    assert fusedops.get_policy().sources == ()


def test_an_error_on_entering_begins_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    block = fusedops.use("triton")
    monkeypatch.setenv("FUSEDOPS_FALLBACK", "xyzzy")
    with pytest.raises(PolicyError, match="FUSEDOPS_FALLBACK"), block:
        raise AssertionError("not reached")
    monkeypatch.delenv("FUSEDOPS_FALLBACK")
    assert fusedops.get_policy().sources == ()

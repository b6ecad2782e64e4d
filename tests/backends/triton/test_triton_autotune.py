"""FUSEDOPS_AUTOTUNE=1: what is tuned, and when. Timers are stubs, kernels interpreted."""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from autotune_cases import Timer, X, forget, only, softmax
from triton.runtime.errors import OutOfResources

from fusedops_triton import _autotune, _settings
from fusedops_triton._bias_dropout import dropout_backward, dropout_forward
from fusedops_triton._bias_gelu import gelu_backward, gelu_forward
from fusedops_triton._launch import Launch
from fusedops_triton._settings import neighbours, plan
from fusedops_triton._softmax import softmax_backward, softmax_forward

pytestmark = pytest.mark.usefixtures("nothing_tuned")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every launch: kernel, programs, warps."""
    seen: list[tuple[str, int, int]] = []
    through = Launch._launch_with_triton

    def noting(self: Launch, args: tuple[Any, ...]) -> Any:
        seen.append((self.kernel.fn.__name__, self.grid[0], self.warps))
        return through(self, args)

    monkeypatch.setattr(Launch, "_launch_with_triton", noting)
    return seen


def test_the_first_call_tunes_and_the_second_does_not(
    cache: pathlib.Path, timer: Timer, launched: list[tuple[str, int, int]]
) -> None:
    want = torch.softmax(0.3 * X, -1)
    table = plan(40, 4, 1)
    settings = [table, *neighbours(table)]
    torch.testing.assert_close(softmax(), want)
    assert timer.asked == [len(settings)] == [4]
    # each is tried once, then timed; then the last, which the timer liked best, serves the call
    best = ("_forward_on_chip", _settings.ceil_div(15, settings[-1].rows), settings[-1].warps)
    assert len(set(launched)) >= 3
    assert len(launched) == 2 * len(settings) + 1
    assert launched[-1] == best
    launched.clear()
    torch.testing.assert_close(softmax(), want)
    assert launched == [best]
    assert len(timer.asked) == 1


def test_what_is_known_serves_other_shapes_of_the_same_width(cache: pathlib.Path, timer: Timer) -> None:
    softmax()
    softmax(torch.randn(2, 64))
    softmax_forward(X, torch.zeros(5, 40, dtype=torch.bool), 1.0, True)
    assert len(timer.asked) == 1
    softmax(torch.randn(2, 65))
    softmax(X.double())
    softmax_backward(X, X, 0.3, False)
    assert len(timer.asked) == 4
    names = json.loads(only(cache).read_text())["settings"]
    assert list(names) == [
        "_softmax._forward_on_chip 64 4",
        "_softmax._forward_on_chip 128 4",
        "_softmax._forward_on_chip 64 8",
        "_softmax._backward_on_chip 64 4",
    ]


def test_flat_kernels_are_tuned_to_the_same_bits(cache: pathlib.Path, timer: Timer, monkeypatch: Any) -> None:
    x, bias, seed = torch.randn(4, 600), torch.randn(600), torch.tensor([5])
    calls: list[Callable[[], Any]] = [
        lambda: gelu_forward(x, bias, "tanh"),
        lambda: gelu_backward(x, x, bias, "tanh", (True, False))[0],
        lambda: dropout_forward(x, bias, x, 0.3, True, seed),
        lambda: dropout_backward(x, seed, bias, 0.3, True, x.dtype, (True, False))[0],
    ]
    tuned = [call() for call in calls]
    assert len(timer.asked) == 4
    monkeypatch.delenv("FUSEDOPS_AUTOTUNE")
    forget()
    for call, once in zip(calls, tuned, strict=True):
        assert torch.equal(call(), once)
    assert len(timer.asked) == 4


def test_the_sums_for_a_bias_are_never_tuned(cache: pathlib.Path, timer: Timer) -> None:
    x, bias, seed = torch.randn(100, 48), torch.randn(48), torch.tensor([5])
    gelu_backward(x, x, bias, "tanh", (True, True))
    dropout_backward(x, seed, bias, 0.3, True, x.dtype, (True, True))
    assert timer.asked == []
    assert not cache.exists()


def test_a_small_call_is_not_timed_and_a_larger_one_later_is(
    cache: pathlib.Path, timer: Timer, launched: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_autotune, "LEAST_BYTES", X.nbytes)
    softmax(X[:1])
    table = plan(40, 4, 1)
    assert launched == [("_forward_on_chip", 1, table.warps)]
    assert timer.asked == []
    softmax()
    assert len(timer.asked) == 1
    launched.clear()
    softmax(X[:1])
    assert launched[-1][2] == neighbours(table)[-1].warps
    assert len(launched) == 1


def test_under_graph_capture_the_table_serves_and_nothing_is_decided(
    cache: pathlib.Path, timer: Timer, launched: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_autotune, "_capturing", lambda home: True)
    softmax()
    assert launched == [("_forward_on_chip", 1, plan(40, 4, 1).warps)]
    assert timer.asked == []
    monkeypatch.setattr(_autotune, "_capturing", lambda home: False)
    softmax()
    assert len(timer.asked) == 1


def test_settings_that_spill_or_do_not_fit_are_left_out(
    cache: pathlib.Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compiled:
        n_spills = 0

    table = plan(40, 4, 1)
    outcomes: dict[int, Any] = {}
    monkeypatch.setattr(Launch, "_launch_with_triton", lambda self, args: outcomes[self.warps](self))

    def spills(launch: Launch) -> Compiled:
        compiled = Compiled()
        compiled.n_spills = 4
        return compiled

    def does_not_fit(launch: Launch) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    outcomes = {table.warps: lambda launch: Compiled(), table.warps * 2: spills, table.warps // 2: does_not_fit}
    same = [one for one in (table, *neighbours(table)) if one.warps == table.warps]
    softmax()
    assert timer.asked == [len(same)] == [3]
    outcomes = {table.warps: spills, table.warps * 2: does_not_fit}
    timer.asked.clear()
    forget()
    softmax(X[..., :20])
    assert timer.asked == [1], "the table's own is always there"


def test_an_error_of_a_kernel_is_not_swallowed(
    cache: pathlib.Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Launch, args: tuple[Any, ...]) -> None:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(Launch, "_launch_with_triton", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        softmax()
    assert not cache.exists()


def test_the_timer_takes_medians_and_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = -1.0

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            assert self.at >= 0

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def takes(name: str, usual: float) -> Callable[[], None]:
        def call() -> None:
            order.append(name)
            clock[0] += 100.0 if order.count(name) == 3 else usual  # once something else had the GPU

        return call

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    times = _autotune.cuda_milliseconds([takes("slow", 3.0), takes("quick", 2.0)], X)
    assert times == [3.0, 2.0]
    assert order == ["slow", "quick"] * _autotune.TURNS

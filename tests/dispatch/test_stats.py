"""Counts of calls, the table at the end, the log's first-use lines, observing plugins, ranges of torch.profiler."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import OPTIONS, every_op, inputs, loss, public, registered, requiring_a_gradient, shapes
from state import active_plans, remove_observers

import fusedops
from fusedops import FallbackWarning
from fusedops.constraints import Dim

pytestmark = pytest.mark.usefixtures("no_compiled_backend")

OP = "scaled_masked_softmax"
softmax = fusedops.scaled_masked_softmax
X = torch.ones(2, 4)
LONG = torch.ones(2, 9)
SHORT = Dim("x", (-1,), at_most=8)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing counted, and no observer."""
    remove_observers(monkeypatch)
    fusedops.reset_stats()
    yield
    fusedops.reset_stats()


def counts() -> dict[tuple[str, str, str, tuple[str, ...]], int]:
    """Calls by op, direction, backend, and the backends that were passed over."""
    return {
        (c.op, c.direction, c.backend, tuple(r.backend for r in c.refused)): c.calls for c in fusedops.stats().counts
    }


# --------------------------------------------------------------------------------------------------------------- counts


@every_op
def test_every_op_is_counted_by_every_way(op: str) -> None:
    call = public(op)
    for _ in range(2):
        call(*inputs(op))
    loss(call(*requiring_a_gradient(op, inputs(op)))).backward()
    registered(op)(*inputs(op))
    assert counts() == {(op, "forward", "eager", ()): 4, (op, "backward", "eager", ()): 1}


def test_a_compiled_call_is_counted() -> None:
    torch.compiler.reset()
    torch.compile(softmax, backend="aot_eager", fullgraph=True)(X)
    assert counts() == {(OP, "forward", "eager", ()): 1}


def test_a_gradient_is_counted_when_it_runs(fakes: Any) -> None:
    y = softmax(X.clone().requires_grad_())
    assert counts() == {(OP, "forward", "eager", ()): 1}
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert counts()[OP, "backward", "eager", ()] == 2


def test_the_reference_is_no_backend() -> None:
    torch.func.grad(lambda x: softmax(x).sum())(X)
    torch.vmap(softmax)(torch.ones(2, 3, 4))
    assert counts() == {}


def test_what_refused_is_counted_apart(fakes: Any) -> None:
    fakes("short", SHORT, backward=None)
    with fusedops.use("short", fallback="silent"):
        for _ in range(3):
            softmax(X)
        softmax(LONG)
        softmax(torch.ones(2, 10))
        softmax(X.clone().requires_grad_()).sum().backward()
    assert counts() == {
        (OP, "forward", "short", ()): 4,
        (OP, "forward", "eager", ("short",)): 2,
        (OP, "backward", "eager", ("short",)): 1,
    }
    assert str(fusedops.stats()).splitlines() == [
        "scaled_masked_softmax: 6 calls",
        "   66.7 % ran short (4)",
        "   33.3 % ran eager (2)",
        "          not short: got dim -1 of x = 9, expected a size of at most 8",
        "scaled_masked_softmax backward: 1 call",
        "    100 % ran eager (1)",
        "          not short: has no kernel for scaled_masked_softmax backward",
    ]


def test_one_row_however_many_policies_and_plans(fakes: Any) -> None:
    fakes("short", SHORT)
    for text in ("short", "short,eager"):
        with fusedops.use(text, fallback="silent"):
            softmax(LONG)
    fusedops.set_policy("short", fallback="silent")
    softmax(LONG)
    assert counts() == {(OP, "forward", "eager", ("short",)): 3}


def test_a_call_without_a_backend_is_not_counted(fakes: Any) -> None:
    fakes("short", SHORT)
    with fusedops.use("short", fallback="raise"), pytest.raises(fusedops.NoBackendError):
        softmax(LONG)
    assert counts() == {}


def test_stats_as_data(fakes: Any) -> None:
    fakes("short", SHORT)
    with fusedops.use("short", fallback="silent"):
        softmax(LONG)
    (row,) = json.loads(json.dumps(fusedops.stats().to_dict()))["counts"]
    reason = row.pop("refused")
    assert row == {"op": OP, "direction": "forward", "backend": "eager", "calls": 1}
    assert reason[0]["backend"] == "short"
    assert reason[0]["constraint"] == "x: dim -1 a size of at most 8"
    assert reason[0]["reason"]["code"] == "size"


def test_reading_does_not_count_and_reset_begins_anew() -> None:
    for wanted in (1, 2, 3):
        softmax(X)
        assert counts() == {(OP, "forward", "eager", ()): wanted}
        assert fusedops.stats() == fusedops.stats()
    fusedops.reset_stats()
    assert fusedops.stats().counts == ()
    assert str(fusedops.stats()) == "no calls counted"
    softmax(X)
    assert counts() == {(OP, "forward", "eager", ()): 1}


def test_threads_lose_no_call(fakes: Any) -> None:
    fakes("short", SHORT)
    fusedops.set_policy("short", fallback="silent")
    barrier = threading.Barrier(8)
    before = sys.getswitchinterval()

    def work() -> None:
        barrier.wait(20)
        for _ in range(200):
            softmax(X)
            softmax(LONG)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            fusedops.stats()
            threads[0].join(0.01)
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert counts() == {(OP, "forward", "short", ()): 1600, (OP, "forward", "eager", ("short",)): 1600}


def test_the_table_at_the_end(program: Any) -> None:
    call = "fusedops.bias_gelu(torch.ones(3))\n"
    code = f"import torch, fusedops; torch.set_num_threads(1)\n{call * 2}print('done')"

    def run(value: str) -> Any:
        return program("-c", code, FUSEDOPS_STATS=value, FUSEDOPS_BACKEND="eager")

    done = run("1")
    assert done.stdout == "done\n"
    assert done.stderr.splitlines() == [
        "fusedops, calls by backend (FUSEDOPS_STATS):",
        "bias_gelu: 2 calls",
        "    100 % ran eager (2)",
    ]
    assert run("0").stderr == ""
    expected = run("yes")
    assert expected.stdout == "done\n"
    assert "FusedOpsWarning: environment: got FUSEDOPS_STATS='yes', which has no effect, expected 1" in expected.stderr
    assert "100 %" not in expected.stderr


# ------------------------------------------------------------------------------------------------------ the first use


def test_the_first_use_is_logged_once(fakes: Any, log_of: Callable[..., list[logging.LogRecord]]) -> None:
    fakes("short", SHORT)
    log = log_of("fusedops", logging.INFO)
    with fusedops.use("short", fallback="silent"):
        for _ in range(2):
            softmax(X)
            softmax(LONG)
        softmax(X.clone().requires_grad_()).sum().backward()
        with fusedops.use("eager"):
            softmax(X)
    assert [(r.name, r.levelname, r.getMessage()) for r in log] == [
        ("fusedops", "INFO", "scaled_masked_softmax runs on short"),
        (
            "fusedops",
            "INFO",
            "scaled_masked_softmax runs on eager; not on short: got dim -1 of x = 9, expected a size of at most 8",
        ),
        ("fusedops", "INFO", "scaled_masked_softmax backward runs on short"),
    ]


def test_after_the_first_call_a_plan_has_the_counter_itself() -> None:
    softmax(X)
    first = active_plans()[OP, "cpu"].first
    assert type(first.count) is itertools.count, "anything else costs the hot path more"


def test_to_explain_is_no_use(fakes: Any, log_of: Callable[..., list[logging.LogRecord]]) -> None:
    log = log_of("fusedops", logging.INFO)
    fusedops.explain(OP, X)
    assert log == []
    assert counts() == {}


# ------------------------------------------------------------------------------------------------- observing plugins


class Watcher:
    """A tool: a plugin without a backend."""

    def __init__(self) -> None:
        self.seen: list[fusedops.Event] = []

    @fusedops.hookimpl
    def fusedops_observe(self, event: fusedops.Event) -> None:
        self.seen.append(event)


def test_an_observer_gets_first_uses_and_fallbacks_and_not_calls(fakes: Any) -> None:
    fakes("short", SHORT)
    watcher = Watcher()
    assert fusedops.register(watcher, "watcher") is None
    with fusedops.use("short", fallback="silent"):  # hides the warning, not the event
        for _ in range(3):
            softmax(X)
            softmax(LONG)
    assert [(e.kind, e.backend, [r.backend for r in e.refused]) for e in watcher.seen] == [
        ("first use", "short", []),
        ("fallback", "eager", ["short"]),
        ("first use", "eager", ["short"]),
    ]
    data = json.loads(json.dumps(watcher.seen[1].to_dict()))
    (refused,) = data.pop("refused")
    assert data == {
        "kind": "fallback",
        "op": OP,
        "direction": "forward",
        "backend": "eager",
        "device_type": "cpu",
        "policy": 'use(): "short"; fallback silent (from use())',
    }
    assert refused["reason"]["given"] == "dim -1 of x = 9"
    fusedops.unregister("watcher")
    softmax(X.clone().requires_grad_()).sum().backward()
    assert len(watcher.seen) == 3


def test_a_backend_may_observe_too(fakes: Any) -> None:
    seen: list[str] = []

    class Plugin:
        @fusedops.hookimpl
        def fusedops_backend(self) -> fusedops.Backend:
            return fusedops.Backend("mine", ("cpu",), -5, ())

        @fusedops.hookimpl
        def fusedops_observe(self, event: fusedops.Event) -> None:
            seen.append(event.kind)

    backend = fusedops.register(Plugin())
    assert backend is not None
    softmax(X)
    assert seen == ["first use"]
    fusedops.unregister("mine")
    fusedops.bias_gelu(X)
    assert seen == ["first use"]


def test_an_observer_that_raises_breaks_no_call_and_is_reported_once(fakes: Any) -> None:
    class Broken:
        @fusedops.hookimpl
        def fusedops_observe(self, event: fusedops.Event) -> None:
            raise OSError("disk full")

    watcher = Watcher()
    fusedops.register(Broken(), "broken")
    fusedops.register(watcher, "watcher")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        softmax(X)
        fusedops.bias_gelu(X)
    assert [str(w.message) for w in caught] == [
        "plugin 'broken': got OSError: disk full from its fusedops_observe, expected no exception; the call goes on; "
        "to fix: correct it, or call fusedops.unregister('broken')"
    ]
    assert len(watcher.seen) == 2
    assert sum(counts().values()) == 2


def test_an_observer_may_call_ops(fakes: Any) -> None:
    class Calling:
        @fusedops.hookimpl
        def fusedops_observe(self, event: fusedops.Event) -> None:
            softmax(X)

    fusedops.register(Calling(), "calling")
    softmax(X)
    assert counts() == {(OP, "forward", "eager", ()): 2}


# --------------------------------------------------------------------------------------------------------- the profiler


@pytest.mark.parametrize(
    ("op", "way"),
    [*((op, ("called", "bound")[place % 2]) for place, op in enumerate(OPTIONS)), (OP, "compiled"), (OP, "bound")],
)
def test_each_call_is_a_range_when_profiling(op: str, way: str) -> None:
    call = public(op)
    tensors = inputs(op)
    if way == "compiled":
        call = torch.compile(call, backend="aot_eager")
    if way == "bound":
        bound = fusedops.bind(op, **dict(zip(shapes(op), tensors)), **OPTIONS[op])
        call = lambda *tensors: bound(**dict(zip(shapes(op), tensors)), **OPTIONS[op])  # noqa: E731
    tensors = requiring_a_gradient(op, tensors)
    loss(call(*tensors)).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss(call(*tensors)).backward()
        call(*inputs(op))
    found = {
        event.key: event.count
        for event in profile.key_averages()
        if event.key.startswith("fusedops::") and "[" in event.key
    }
    assert found == {f"fusedops::{op}[eager]": 2, f"fusedops::{op}_backward[eager]": 1}


def test_a_range_ends_where_a_kernel_raises(fakes: Any) -> None:
    def breaks(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("half way")

    fakes("broken", run=breaks)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with pytest.raises(ArithmeticError, match="half way"):
            softmax(X)
        softmax(X, backend="eager")
    names = {event.name: event for event in profile.events()}
    first, second = names[f"fusedops::{OP}[broken]"], names[f"fusedops::{OP}[eager]"]
    assert first.time_range.end <= second.time_range.start


# ------------------------------------------------------------------------------------------------ warnings as errors


@pytest.mark.filterwarnings("error")
def test_a_fallback_made_an_error_is_raised_at_each_call_and_given_later(fakes: Any) -> None:
    fakes("short", SHORT, backward=None)
    grown = X.clone().requires_grad_()
    for _ in range(2):
        with pytest.raises(FallbackWarning, match="runs on eager, not on short: got dim -1 of x = 9"):
            softmax(LONG, backend="short")
        with pytest.raises(FallbackWarning, match="backward runs on eager, not on short: has no kernel"):
            softmax(grown, backend="short")
    for _ in range(2):  # who cannot run here at all
        with pytest.raises(FallbackWarning, match="bias_gelu runs on eager, not on short: has no kernel for bias_gelu"):
            fusedops.bias_gelu(X, backend="short")
    assert counts().get((OP, "forward", "eager", ("short",))) is None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            softmax(LONG, backend="short")
    assert len(caught) == 1, "an error was not the warning: it is still to be given, once"

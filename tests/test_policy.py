"""Policies: the grammar, the four channels and their order, the fallback levels, threads and tasks, the environment."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fusedops
from fusedops import FusedOpsWarning, PolicyError, _in_force
from fusedops._policy import AUTO, Layer, parse
from fusedops._registry import registry

OP = "scaled_masked_softmax"
OTHER = "bias_gelu"
KNOWN = f"known are {', '.join(sorted([AUTO, *registry.names()]))}"
X = torch.ones(2, 4)


def who() -> str | None:
    return fusedops.explain(OP, X).backend


def wishes(*args: Any, **kwargs: Any) -> list[tuple[str, str, bool]]:
    return [(w.channel, w.text, w.counted) for w in fusedops.explain(OP, X, *args, **kwargs).wishes]


# ---------------------------------------------------------------------------------------------------------- the grammar


@pytest.mark.parametrize(
    ("text", "order", "per_op"),
    [
        ("", None, {}),
        ("  ", None, {}),
        (";", None, {}),
        ("eager", ("eager",), {}),
        ("npu,triton", ("npu", "triton"), {}),
        ("  npu ,\ttriton  ", ("npu", "triton"), {}),
        ("auto", ("auto",), {}),
        ("npu, auto, eager", ("npu", "auto", "eager"), {}),
        ("eager, eager", ("eager", "eager"), {}),
        (f"npu,triton; {OP}=eager", ("npu", "triton"), {OP: ("eager",)}),
        (f"{OP}=eager; npu", ("npu",), {OP: ("eager",)}),
        (f" {OP} = eager , triton ;", None, {OP: ("eager", "triton")}),
        (f"{OP}=eager;{OTHER}=triton;;", None, {OP: ("eager",), OTHER: ("triton",)}),
    ],
)
def test_a_text_is_an_order_and_orders_for_single_ops(text: str, order: Any, per_op: Any) -> None:
    layer = parse(text, "use()")
    assert (layer.order, dict(layer.per_op), layer.text) == (order, per_op, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tritn", f"\"tritn\": no backend is called 'tritn'; the nearest is 'triton'; {KNOWN}"),
        ("eager,xyzzy", f"\"eager,xyzzy\": no backend is called 'xyzzy'; {KNOWN}; name one of these"),
        ("Eager", f"\"Eager\": no backend is called 'Eager'; the nearest is 'eager'; {KNOWN}"),
        ("eager triton", f"\"eager triton\": no backend is called 'eager triton'; the nearest is 'triton'; {KNOWN}"),
        ("eager,,triton", '"eager,,triton" has an empty name; needs backends, separated by commas; write "npu,triton"'),
        ("eager,", '"eager," has an empty name; needs backends, separated by commas; write "npu,triton"'),
        (f"{OP}=", f'"{OP}=" has an empty name; needs backends, separated by commas; write "npu,triton"'),
        (f"{OP}=tritn", f"\"{OP}=tritn\": no backend is called 'tritn'; the nearest is 'triton'; {KNOWN}"),
        (
            "eager; triton",
            '"eager; triton" has two orders for every op; needs one, with the orders for single ops after it, '
            'as in "npu,triton; bias_gelu=eager"',
        ),
        (f"{OP}=eager; {OP}=npu", f'"{OP}=eager; {OP}=npu" has two orders for {OP}; needs one; join them with commas'),
    ],
)
def test_what_is_not_understood_is_said(text: str, message: str) -> None:
    for say in (lambda: fusedops.use(text), lambda: parse(text, "use()")):
        with pytest.raises(PolicyError) as error:
            say()
        assert str(error.value) == f"use(): {message}"


@pytest.mark.parametrize("text", ["softmax=eager", "scaled_masked_softmx=eager", "a=b=eager", "=eager"])
def test_an_unknown_op_is_said_with_the_known_ones(text: str) -> None:
    with pytest.raises(PolicyError, match=r"^use\(\): \".*\": no op is called '.*;? known are .*scaled_masked_softmax"):
        fusedops.use(text)


def test_the_nearest_op_is_named() -> None:
    with pytest.raises(PolicyError, match="the nearest is 'scaled_masked_softmax'"):
        fusedops.use("scaled_masked_softmx=eager")


@pytest.mark.parametrize(
    "say", [lambda level: fusedops.use(fallback=level), lambda level: fusedops.set_policy(fallback=level)]
)
def test_an_unknown_fallback_level_is_said(say: Callable[[str], object]) -> None:
    with pytest.raises(PolicyError, match=r"no fallback level is called 'loud'; known are raise, silent, warn"):
        say("loud")
    assert fusedops.get_policy().fallback == "warn"


@given(st.text("eagrti,;= _nou\n", max_size=20))
def test_any_text_is_a_layer_or_a_policy_error(text: str) -> None:
    try:
        layer = parse(text, "use()")
    except PolicyError:
        return
    assert isinstance(layer, Layer)
    assert all(name in (AUTO, *registry.names()) for name in layer.order or ())


def test_a_refused_text_changes_nothing() -> None:
    fusedops.set_policy("eager")
    for say in (lambda: fusedops.set_policy("tritn"), lambda: fusedops.set_policy("npu", fallback="loud")):  # type: ignore[arg-type]
        with pytest.raises(PolicyError):
            say()
    assert str(fusedops.get_policy()) == 'set_policy(): "eager"; fallback warn (default)'


# ---------------------------------------------------------------------------------------------------- the four channels


def test_the_default_is_the_order_of_priority() -> None:
    assert fusedops.get_policy().order(OP) == (AUTO,)
    assert wishes() == []
    assert str(fusedops.get_policy()) == "auto (nothing set); fallback warn (default)"


def test_the_innermost_channel_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDOPS_BACKEND", "triton")
    assert who() == "triton"
    fusedops.set_policy("eager")
    assert who() == "eager"
    with fusedops.use("triton"):
        assert who() == "triton"
        with fusedops.use("eager"):
            assert who() == "eager"
            assert fusedops.explain(OP, X, backend="triton").backend == "triton"
            assert wishes(backend="triton") == [
                ("backend=", "triton", True),
                ("use()", "eager", False),
                ("use()", "triton", False),
                ("set_policy()", "eager", False),
                ("FUSEDOPS_BACKEND", "triton", False),
            ]
        assert who() == "triton"
    assert who() == "eager"
    fusedops.set_policy(None)
    assert who() == "triton"
    assert wishes() == [("FUSEDOPS_BACKEND", "triton", True)]


def test_a_channel_that_speaks_only_of_another_op_does_not_overrule() -> None:
    fusedops.set_policy("triton")
    with fusedops.use(f"{OTHER}=eager"):
        assert who() == "triton"
        assert wishes() == [("set_policy()", "triton", True)]
        assert fusedops.get_policy().order(OTHER) == ("eager",)
        with fusedops.use(f"{OTHER}=npu; {OP}=eager"):
            assert who() == "eager"
    with fusedops.use(fallback="silent"):
        assert who() == "triton"


def test_an_inner_general_order_overrules_an_outer_one_for_the_op() -> None:
    fusedops.set_policy(f"{OP}=eager")
    with fusedops.use("triton"):
        assert who() == "triton"


def test_auto_in_an_inner_channel_goes_back_to_the_default_order() -> None:
    with fusedops.use("triton"), fusedops.use("auto"):
        assert who() == "eager"
    with fusedops.use("npu,auto", fallback="silent"):
        assert who() == "eager"


def test_after_the_named_ones_come_the_rest() -> None:
    order = [v.backend for v in fusedops.explain(OP, X, backend="triton").candidates]
    assert [name for name in order if name in ("eager", "npu", "triton")] == ["triton", "npu", "eager"]


@pytest.mark.parametrize("level", ["warn", "silent", "raise"])
def test_the_fallback_level_comes_through_every_channel(level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fusedops.get_policy().fallback == "warn"
    monkeypatch.setenv("FUSEDOPS_FALLBACK", "raise" if level == "silent" else "silent")
    fusedops.set_policy(None)
    assert fusedops.get_policy().fallback != "warn"
    assert str(fusedops.get_policy()).endswith("(from FUSEDOPS_FALLBACK)")
    fusedops.set_policy(fallback=level)
    assert fusedops.get_policy().fallback == level
    with fusedops.use("eager"):
        assert fusedops.get_policy().fallback == level
        with fusedops.use(fallback="warn"):
            assert fusedops.get_policy().fallback == "warn"
            assert str(fusedops.get_policy()) == 'use(): "eager"; fallback warn (from use())'
    fusedops.set_policy(None)
    assert str(fusedops.get_policy()).endswith("(from FUSEDOPS_FALLBACK)")


# ------------------------------------------------------------------------------------------------------------------ use


def test_use_gives_the_policy_and_ends_with_its_block_also_by_an_error() -> None:
    with fusedops.use("eager") as policy:
        assert policy is fusedops.get_policy()
        assert policy.order(OP) == ("eager",)

    def fail() -> None:
        with fusedops.use("triton"):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert wishes() == []


def test_use_as_a_decorator_recursively() -> None:
    @fusedops.use("triton")
    def chosen(depth: int = 2) -> list[str | None]:
        """Says who."""
        return [who(), *(chosen(depth - 1) if depth else [])]

    assert chosen() == ["triton"] * 3
    assert chosen.__doc__ == "Says who."
    assert who() == "eager"


def test_one_use_object_serves_many_times() -> None:
    slow = fusedops.use("triton")
    with slow, fusedops.use("eager"), slow:
        assert who() == "triton"
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
        with pytest.raises(
            TypeError, match=rf"use\(\) cannot decorate {function.__name__}, a generator: .*; put `with"
        ):
            fusedops.use("triton")(function)


def test_threads_see_only_their_own() -> None:
    seen: dict[str, list[str | None]] = {}
    barrier = threading.Barrier(2)

    def work(name: str) -> None:
        outside = who()
        with fusedops.use(name):
            barrier.wait(20)
            inside = who()
            barrier.wait(20)
        seen[name] = [outside, inside, who()]

    with fusedops.use("triton"):  # this thread's alone
        threads = [threading.Thread(target=work, args=(name,)) for name in ("eager", "triton")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {"eager": ["eager", "eager", "eager"], "triton": ["eager", "triton", "eager"]}


def test_tasks_see_their_own_and_what_was_around_them() -> None:
    async def work(name: str | None) -> list[str | None]:
        before = who()
        with fusedops.use(name):
            await asyncio.sleep(0)
            inside = who()
            await asyncio.sleep(0)
        return [before, inside]

    async def both() -> Any:
        with fusedops.use("triton"):
            return await asyncio.gather(work("eager"), work(None), work("triton"))

    assert asyncio.run(both()) == [["triton", "eager"], ["triton", "triton"], ["triton", "triton"]]


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
        assert wishes() == []


def test_set_policy_is_seen_by_every_thread() -> None:
    seen: list[str | None] = []
    fusedops.set_policy("triton")
    thread = threading.Thread(target=lambda: seen.append(who()))
    thread.start()
    thread.join()
    assert seen == ["triton"]


def test_entering_in_a_loop_makes_no_new_plans() -> None:
    policies = set()
    for _ in range(5):
        with fusedops.use("eager") as policy:
            fusedops.scaled_masked_softmax(X)
            policies.add(id(policy))
    assert len(policies) == 1


# ------------------------------------------------------------------------------------------------------ the environment


def test_set_policy_none_reads_the_environment_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert who() == "eager"
    monkeypatch.setenv("FUSEDOPS_BACKEND", "triton")
    assert who() == "eager"  # read on first need, once
    fusedops.set_policy(None)
    assert who() == "triton"
    monkeypatch.delenv("FUSEDOPS_BACKEND")
    fusedops.set_policy(None)
    assert who() == "eager"


def test_empty_variables_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FUSEDOPS_BACKEND", "FUSEDOPS_FALLBACK", "FUSEDOPS_PLUGINS"):
        monkeypatch.setenv(name, " ")
    assert str(fusedops.get_policy()) == "auto (nothing set); fallback warn (default)"


def test_an_unknown_variable_is_warned_of_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDOPS_BAKCEND", "eager")
    monkeypatch.setenv("FUSEDOPS_XYZZY", "1")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert who() == "eager"
        assert who() == "eager"
    known = f"known are {', '.join(_in_force.VARIABLES)}"
    assert [(w.category, str(w.message)) for w in said] == [
        (
            FusedOpsWarning,
            f"no FUSEDOPS variable is called 'FUSEDOPS_BAKCEND'; the nearest is 'FUSEDOPS_BACKEND'; {known}; it has no "
            f"effect",
        ),
        (
            FusedOpsWarning,
            f"no FUSEDOPS variable is called 'FUSEDOPS_XYZZY'; {known}; name one of these; it has no effect",
        ),
    ]


def test_a_broken_environment_is_said_at_each_call_until_it_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDOPS_FALLBACK", "loud")
    for _ in range(2):
        with pytest.raises(PolicyError, match=r"^FUSEDOPS_FALLBACK: no fallback level is called 'loud'; known are "):
            fusedops.scaled_masked_softmax(X)
    monkeypatch.setenv("FUSEDOPS_FALLBACK", "silent")
    fusedops.scaled_masked_softmax(X)


# The same from outside, where a user sets it. One process per variable would cost two seconds each: fork after import.
ENVIRONMENTS = {
    "misspelt": {"FUSEDOPS_BACKEND": "tritn"},
    "misnamed": {"FUSEDOPS_BAKCEND": "x"},
    "mixed": {"FUSEDOPS_BACKEND": "npu,triton; scaled_masked_softmax=eager"},
    "loud": {"FUSEDOPS_FALLBACK": "loud"},
    "silent": {"FUSEDOPS_BACKEND": "npu", "FUSEDOPS_FALLBACK": "silent"},
    "raise": {"FUSEDOPS_BACKEND": "npu", "FUSEDOPS_FALLBACK": "raise"},
    "none": {"FUSEDOPS_PLUGINS": "none"},
    "list": {"FUSEDOPS_PLUGINS": "stranger, unheard"},
    "all": {"FUSEDOPS_PLUGINS": "all"},
    "barred": {"FUSEDOPS_PLUGINS": "none", "FUSEDOPS_BACKEND": "stranger"},
}
SCRIPT = """
import json, os, sys, warnings
import torch, fusedops

def outcome():
    x = torch.ones(2, 4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            y = fusedops.scaled_masked_softmax(x)
            decision = fusedops.explain("scaled_masked_softmax", x).to_dict()
            error = ""
        except fusedops.FusedOpsError as raised:
            decision, error = None, f"{type(raised).__name__}: {raised}"
    infos = fusedops.backends() if "FUSEDOPS_PLUGINS" in os.environ else []
    known = {info.name: [info.state, info.why] for info in infos}
    return {"decision": decision, "error": error, "said": [str(w.message) for w in said], "backends": known}

told = {}
for name, variables in json.loads(os.environ.pop("ENVIRONMENTS")).items():
    read, write = os.pipe()
    if os.fork() == 0:
        os.environ.update(variables)
        os.write(write, json.dumps(outcome()).encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        told[name] = json.load(pipe)
    os.wait()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def outside(python: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    import json

    site = tmp_path_factory.mktemp("site")
    for name in ("stranger", "other"):
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fusedops.backends]\n{name} = {name}\n")
        (site / f"{name}.py").write_text(
            "import fusedops\n@fusedops.hookimpl\ndef fusedops_backend():\n"
            f"    return fusedops.Backend({name!r}, ('cuda',), 5, ())\n"
        )
    return python(SCRIPT, site, ENVIRONMENTS=json.dumps(ENVIRONMENTS))


def test_outside_a_misspelt_backend_is_an_error_with_the_nearest(outside: dict[str, Any]) -> None:
    error = outside["misspelt"]["error"]
    start = "PolicyError: FUSEDOPS_BACKEND: \"tritn\": no backend is called 'tritn'; the nearest is 'triton'; known are"
    assert error.startswith(start)
    assert {"eager", "npu", "triton"} < set(error.rpartition("known are ")[2].split(", "))


def test_outside_a_misnamed_variable_is_a_warning_with_the_nearest(outside: dict[str, Any]) -> None:
    assert outside["misnamed"]["error"] == ""
    assert [text[:96] for text in outside["misnamed"]["said"]] == [
        "no FUSEDOPS variable is called 'FUSEDOPS_BAKCEND'; the nearest is 'FUSEDOPS_BACKEND'; known are "
    ]


def test_outside_a_mixed_order_does_what_it_says_and_explain_says_who_decided(outside: dict[str, Any]) -> None:
    told = outside["mixed"]
    assert (told["error"], told["said"]) == ("", [])
    assert told["decision"]["backend"] == "eager"
    assert told["decision"]["wishes"] == [
        {"channel": "FUSEDOPS_BACKEND", "text": "npu,triton; scaled_masked_softmax=eager", "counted": True}
    ]
    assert told["decision"]["candidates"][0]["backend"] == "eager"


def test_outside_the_fallback_level_is_obeyed(outside: dict[str, Any]) -> None:
    assert outside["loud"]["error"] == (
        "PolicyError: FUSEDOPS_FALLBACK: no fallback level is called 'loud'; known are raise, silent, warn; "
        "name one of these"
    )
    assert (outside["silent"]["error"], outside["silent"]["said"]) == ("", [])
    assert outside["raise"]["error"].startswith(
        'NoBackendError: no backend takes this call of scaled_masked_softmax (fallback="raise", policy "npu" from '
        "FUSEDOPS_BACKEND)"
    )


def test_outside_plugins_may_be_barred(outside: dict[str, Any]) -> None:
    known = {name: outside[name]["backends"] for name in ("none", "list", "all")}
    assert known["all"]["stranger"] == known["all"]["other"] == ["ready", ""]
    assert known["none"]["stranger"] == ["unavailable", "stranger-dist is not in FUSEDOPS_PLUGINS='none'"]
    assert known["list"]["stranger"] == ["ready", ""]
    assert known["list"]["other"] == ["unavailable", "other-dist is not in FUSEDOPS_PLUGINS='stranger, unheard'"]
    assert all(known[name]["eager"] == ["ready", ""] for name in known)
    barred = outside["barred"]
    assert barred["error"] == ""
    assert barred["said"] == [
        "scaled_masked_softmax runs on eager, not on stranger: unavailable: stranger-dist is not in "
        "FUSEDOPS_PLUGINS='none'. To qualify for stranger: add stranger to FUSEDOPS_PLUGINS, or unset it. (Said once; "
        'fallback="raise" makes this an error, "silent" hides it.)'
    ]

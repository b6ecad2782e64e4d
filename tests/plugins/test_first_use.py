"""The first use of plugins: once, by one of many threads, and only when a call needs backends."""

from __future__ import annotations

import importlib
import pathlib
import sys
from typing import Any

import pytest
from thread_cases import OP, X, softmax, together

import fusedops

NOTED = """
import fusedops
def note(what):
    with open({file!r}, "a") as file: file.write(what + "\\n")
note("import")
def probe(): note("probe")
@fusedops.kernel("bias_gelu")
def kernel(x, bias, approximate): return x
@fusedops.hookimpl
def fusedops_backend():
    note("hook")
    return fusedops.Backend({name!r}, ({device!r},), -5, (kernel,), probe=probe)
"""


def noted_plugin(
    distribution: Any, path: pathlib.Path, name: str, device: str = "cpu"
) -> tuple[pathlib.Path, pathlib.Path]:
    """Installs a plugin that writes down when its code runs; the site folder, and the file it writes."""
    file = path / f"{name}.log"
    source = NOTED.format(file=str(file), name=name, device=device)
    return distribution(f"{name}-dist", {name: f"{name}_module"}, **{f"{name}_module": source}), file


def test_a_first_use_raced_by_16_threads_loads_each_plugin_once(
    distribution: Any, python: Any, tmp_path: pathlib.Path
) -> None:
    files = [noted_plugin(distribution, tmp_path, name)[1] for name in ("one", "two", "three")]
    printed = python(
        """
        import json, sys, threading, torch, fusedops
        torch.set_num_threads(1)
        sys.setswitchinterval(1e-6)
        barrier, found = threading.Barrier(16), []
        def work(n):
            barrier.wait(30)
            if n % 4 == 0: found.append(len(fusedops.backends()))
            elif n % 4 == 1: fusedops.set_policy("one,two,three", fallback="silent")
            else: found.append(float(fusedops.bias_gelu(torch.zeros(3)).sum()))
        threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        counts = {f"{c.op} {c.backend}": c.calls for c in fusedops.stats().counts}
        print(json.dumps([sorted(set(found)), counts, len(fusedops.backends())]))
        """,
        tmp_path / "site",
    )
    values, counts, number = printed
    assert values == [0, number]
    assert sum(counts.values()) == 8
    for file in files:
        assert file.read_text().split() == ["import", "hook", "probe"]


ASKING = """
import time, fusedops
time.sleep(0.5)  # time for the other thread to begin its call
fusedops.get_policy()
@fusedops.hookimpl
def fusedops_backend(): return fusedops.Backend("asking", ("cpu",), -5, ())
"""


def test_a_plugin_that_asks_for_the_policy_while_another_thread_waits_for_it_is_no_deadlock(
    distribution: Any, python: Any
) -> None:
    states = python(
        """
        import faulthandler, json, threading, torch, fusedops
        faulthandler.dump_traceback_later(30, exit=True)
        torch.set_num_threads(1)
        loading = threading.Thread(target=fusedops.backends)
        loading.start()
        fusedops.bias_gelu(torch.ones(3))
        loading.join()
        print(json.dumps({info.name: info.state for info in fusedops.backends()}))
        """,
        distribution("asking-dist", {"asking": "asking_module"}, asking_module=ASKING),
        FUSEDOPS_BACKEND="eager",
    )
    assert states["eager"] == "ready"
    assert states["asking"] == "failed", "its policy's backends cannot be known yet"


# -------------------------------------------------------------------------------------------------------------- plugins


def test_a_plugins_code_runs_only_when_a_call_needs_backends(
    distribution: Any, python: Any, tmp_path: pathlib.Path
) -> None:
    site, here = noted_plugin(distribution, tmp_path, "here")
    _, away = noted_plugin(distribution, tmp_path, "away", device="cuda")
    printed = python(
        f"""
        import json, os, torch, fusedops
        import fusedops.nn, fusedops.compat.megatron, fusedops.constraints
        files, seen = [{str(here)!r}, {str(away)!r}], []
        def look(): seen.append([open(file).read().split() if os.path.exists(file) else [] for file in files])
        fusedops.hookimpl, fusedops.TensorSpec((2, 3)), fusedops.stats(), fusedops.get_policy()
        fusedops.set_policy(fallback="silent")
        look()
        fusedops.bias_gelu(torch.ones(3))
        look()
        fusedops.backends()
        look()
        print(json.dumps(seen))
        """,
        site,
    )
    assert printed == [
        [[], []],
        [["import", "hook", "probe"], ["import", "hook"]],  # no probe of what serves another device
        [["import", "hook", "probe"], ["import", "hook", "probe"]],
    ]


def test_a_plugin_that_is_not_allowed_runs_no_code(distribution: Any, python: Any, tmp_path: pathlib.Path) -> None:
    site, good = noted_plugin(distribution, tmp_path, "good")
    _, other = noted_plugin(distribution, tmp_path, "other")
    code = """
        import json, torch, fusedops
        fusedops.bias_gelu(torch.ones(3))
        print(json.dumps({i.name: [i.state, i.why, i.fix, i.distribution, i.version] for i in fusedops.backends()}))
    """
    printed = python(code, site, FUSEDOPS_PLUGINS="good")
    assert good.exists()
    assert not other.exists()
    assert printed["good"][0] == "ready"
    assert printed["eager"][0] == "ready", "fusedops's own need no permission"
    assert printed["other"] == [
        "unavailable",
        "other-dist is not in FUSEDOPS_PLUGINS='good'",
        "add other to FUSEDOPS_PLUGINS, or unset it",
        "other-dist",
        "1.0",
    ]


def test_a_plugin_installed_at_run_time_appears_after_register_and_never_otherwise(
    distribution: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fusedops.backends()
    site, file = noted_plugin(distribution, tmp_path, "late")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()

    def absent() -> None:
        assert "late" not in [info.name for info in fusedops.backends()]
        assert "late" not in [verdict.backend for verdict in fusedops.explain(OP, X).candidates]
        with pytest.raises(fusedops.PolicyError, match="got backend 'late', expected one of"):
            fusedops.use("late")
        with pytest.raises(fusedops.PolicyError, match="got backend 'late', expected one of"):
            softmax(X, backend="late")

    absent()
    for disturb in (
        lambda: softmax(X),
        lambda: fusedops.set_policy("eager"),
        lambda: fusedops.set_policy(None),
        lambda: fusedops.register(fusedops.Backend("other", ("cpu",), -9, ())),
        lambda: fusedops.unregister("other"),
        lambda: together(lambda n: absent(), 2),
    ):
        disturb()
        absent()
    monkeypatch.setenv("FUSEDOPS_BACKEND", "late")
    with pytest.raises(fusedops.PolicyError, match="FUSEDOPS_BACKEND"):
        fusedops.set_policy(None)
    monkeypatch.delenv("FUSEDOPS_BACKEND")
    assert not file.exists(), "its code has not run"

    module = importlib.import_module("late_module")
    try:
        fusedops.register(module)
        (info,) = [info for info in fusedops.backends() if info.name == "late"]
        assert (info.state, info.file) == ("ready", str(site / "late_module.py"))
        assert "late" in [verdict.backend for verdict in fusedops.explain(OP, X).candidates]
        fusedops.use("late")
        assert file.read_text().split() == ["import", "hook", "probe"]
        fusedops.unregister("late")
        absent()
    finally:
        del sys.modules["late_module"]

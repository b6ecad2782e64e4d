"""Threads, tasks, forks, spawned processes, plugins that come late: each sees its own, and nothing happens twice."""

from __future__ import annotations

import asyncio
import importlib
import pathlib
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusedops

OP = "scaled_masked_softmax"
softmax = fusedops.scaled_masked_softmax
X = torch.ones(2, 4)
MANY = 16


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


def together(work: Callable[[int], None], count: int = MANY) -> None:
    """Runs ``work(0)`` ... in threads that begin at once; what one raises is raised here."""
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


def who() -> int:
    """The number of the backend that serves here, by a call; -1 for eager, whose softmax sums to 1."""
    value = float(softmax(X)[0, 0])
    return -1 if value == 0.25 else int(value)


# ------------------------------------------------------------------------------------------------- threads and tasks


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


LOUD = """
import fusedops
def note(what):
    with open({file!r}, "a") as file: file.write(what + "\\n")
note("import")
def probe(): note("probe")
@fusedops.kernel("bias_gelu")
def kernel(x, bias=None, *, approximate="tanh"): return x
@fusedops.hookimpl
def fusedops_backend():
    note("hook")
    return fusedops.Backend({name!r}, ({device!r},), -5, (kernel,), probe=probe)
"""


def loud(distribution: Any, path: pathlib.Path, name: str, device: str = "cpu") -> tuple[pathlib.Path, pathlib.Path]:
    """Installs a plugin that writes down when its code runs; the site folder, and the file it writes."""
    file = path / f"{name}.log"
    source = LOUD.format(file=str(file), name=name, device=device)
    return distribution(f"{name}-dist", {name: f"{name}_module"}, **{f"{name}_module": source}), file


def test_a_first_use_raced_by_16_threads_loads_each_plugin_once(
    distribution: Any, python: Any, tmp_path: pathlib.Path
) -> None:
    files = [loud(distribution, tmp_path, name)[1] for name in ("one", "two", "three")]
    told = python(
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
    values, counts, number = told
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
    site, here = loud(distribution, tmp_path, "here")
    _, away = loud(distribution, tmp_path, "away", device="cuda")
    told = python(
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
    assert told == [
        [[], []],
        [["import", "hook", "probe"], ["import", "hook"]],  # no probe of what serves another device
        [["import", "hook", "probe"], ["import", "hook", "probe"]],
    ]


def test_a_plugin_that_is_not_allowed_runs_no_code(distribution: Any, python: Any, tmp_path: pathlib.Path) -> None:
    site, good = loud(distribution, tmp_path, "good")
    _, other = loud(distribution, tmp_path, "other")
    code = """
        import json, torch, fusedops
        fusedops.bias_gelu(torch.ones(3))
        print(json.dumps({i.name: [i.state, i.why, i.fix, i.distribution, i.version] for i in fusedops.backends()}))
    """
    told = python(code, site, FUSEDOPS_PLUGINS="good")
    assert good.exists()
    assert not other.exists()
    assert told["good"][0] == "ready"
    assert told["eager"][0] == "ready", "fusedops's own need no permission"
    assert told["other"] == [
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
    site, file = loud(distribution, tmp_path, "late")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()

    def absent() -> None:
        assert "late" not in [info.name for info in fusedops.backends()]
        assert "late" not in [verdict.backend for verdict in fusedops.explain(OP, X).candidates]
        with pytest.raises(fusedops.PolicyError, match="no backend is called 'late'"):
            fusedops.use("late")
        with pytest.raises(fusedops.PolicyError, match="no backend is called 'late'"):
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


# ------------------------------------------------------------------------------------------------------------ processes

# A child that hangs is killed by its alarm, and counts as failed.
FORKS = """
    import json, os, signal, threading, torch, fusedops
    torch.set_num_threads(1)
    softmax = fusedops.scaled_masked_softmax
    x = torch.randn(3, 5)

    def step(**options):
        grown = x.clone().requires_grad_()
        y = softmax(grown, scale=0.5, **options)
        y.square().sum().backward()
        return torch.cat([y.detach(), grown.grad])

    want = step()
    torch.testing.assert_close(step(backend="triton"), want)  # loaded, and used
    fusedops.set_policy("eager; bias_gelu=triton")

    def child(n):
        signal.alarm(60)
        assert fusedops.stats().counts == (), "a process counts its own calls"
        assert torch.equal(step(), want)
        if n % 10 == 0:
            torch.testing.assert_close(step(backend="triton"), want)
        with fusedops.use("eager", fallback="raise"):
            assert torch.equal(step(), want)
        assert str(fusedops.get_policy()).startswith('set_policy(): "eager; bias_gelu=triton"')
        fusedops.set_policy("triton")
        fusedops.register(fusedops.Backend("mine", ("cpu",), -9, ()))
        assert sum(c.calls for c in fusedops.stats().counts) == (6 if n % 10 == 0 else 4)
        assert "mine" in [i.name for i in fusedops.backends()]

    def fork(n):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(n)
                code = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                os._exit(code)
        return pid

    # half of them while other threads call ops, and change policies
    codes = [os.waitstatus_to_exitcode(os.waitpid(fork(n), 0)[1]) for n in range(50)]
    done = threading.Event()
    def busy():
        while not done.is_set():
            with fusedops.use("eager"):
                softmax(x)
            fusedops.stats()
            fusedops.backends()
    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads: thread.start()
    pids = []
    for n in range(50, 100):
        pids.append(fork(n))
        if len(pids) == 2:
            codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            pids = []
    done.set()
    for thread in threads: thread.join()
    here = [i.name for i in fusedops.backends()]
    print(json.dumps([codes, str(fusedops.get_policy()), "mine" in here, torch.equal(step(), want)]))
"""


def test_100_forks_with_loaded_backends_work(python: Any) -> None:
    codes, policy, reached, same = python(FORKS, flags=("-W", "ignore"), TRITON_INTERPRET="1")
    assert codes == [0] * 100
    assert policy.startswith('set_policy(): "eager; bias_gelu=triton"'), "a child's policy is the child's"
    assert not reached
    assert same


HELD = """
    import json, os, signal, threading, torch, fusedops
    from fusedops import _in_force, _stats
    from fusedops._registry import registry
    torch.set_num_threads(1)
    fusedops.bias_gelu(torch.ones(3))
    held, done = threading.Event(), threading.Event()
    def hold():
        with registry._lock, _in_force._lock, _stats._reading, registry.find("eager").lock:
            held.set()
            done.wait(60)
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        fusedops.set_policy("eager")
        fusedops.register(fusedops.Backend("mine", ("cpu",), -9, (), probe=lambda: None))
        fusedops.backends()
        fusedops.bias_gelu(torch.ones(3))
        os._exit(0 if sum(c.calls for c in fusedops.stats().counts) == 1 else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    done.set()
    thread.join()
    print(json.dumps(code))
"""


def test_a_lock_that_another_thread_holds_is_free_in_the_child(python: Any) -> None:
    assert python(HELD, flags=("-W", "ignore")) == 0


WORKERS = """
import json, sys, torch, fusedops
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self): return 12
    def __getitem__(self, n):
        with fusedops.use("eager", fallback="raise"):
            return fusedops.bias_gelu(torch.full((4,), float(n)))

def spawned(n):
    torch.set_num_threads(1)
    deciding = fusedops.get_policy().deciding("bias_gelu")
    value = fusedops.bias_gelu(torch.full((4,), float(n)))
    try:
        fusedops.bias_gelu(torch.ones(3), backend="npu")
        error = None
    except fusedops.NoBackendError as raised:
        error = raised
    return deciding.channel, deciding.text, value.tolist(), error

if __name__ == "__main__":
    torch.set_num_threads(1)
    want = torch.stack([fusedops.bias_gelu(torch.full((4,), float(n))) for n in range(12)])
    how = sys.argv[1]
    if how == "spawn":
        with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.map(spawned, range(12))
        ok = [[*f[:2], f[2] == want[n].tolist(), type(f[3]).__name__, f[3].decision.op] for n, f in enumerate(found)]
        print(json.dumps(sorted(map(str, {str(row): row for row in ok}.values()))))
    else:
        loaded = torch.cat(list(DataLoader(Rows(), batch_size=3, num_workers=2, multiprocessing_context="fork")))
        print(json.dumps(torch.equal(loaded, want)))
"""


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("fork", True),
        ("spawn", ["['FUSEDOPS_BACKEND', 'eager', True, 'NoBackendError', 'bias_gelu']"]),
    ],
)
def test_workers_of_a_data_loader_and_spawned_ones(how: str, wanted: Any, tmp_path: pathlib.Path) -> None:
    import json
    import os

    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ = {**known, "FUSEDOPS_BACKEND": "eager", "FUSEDOPS_FALLBACK": "raise"}
    done = subprocess.run([sys.executable, str(script), how], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == wanted

"""Forks, data loaders and spawned processes."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from state import ALL_LOCKS

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

    want = step(backend="eager")
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

    # half of them while other threads call ops, and change policies. The modules of stats() and backends() are imported
    # before the threads start: in a child forked while a thread imports a module, Python itself hangs on its lock.
    fusedops.stats(), fusedops.backends()
    codes = [os.waitstatus_to_exitcode(os.waitpid(fork(n), 0)[1]) for n in range(20)]
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
    for n in range(20, 40):
        pids.append(fork(n))
        if len(pids) == 2:
            codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            pids = []
    done.set()
    for thread in threads: thread.join()
    here = [i.name for i in fusedops.backends()]
    print(json.dumps([codes, str(fusedops.get_policy()), "mine" in here, torch.equal(step(), want)]))
"""


def test_40_forks_with_loaded_backends_work(python: Any) -> None:
    codes, policy, reached, same = python(FORKS, flags=("-W", "ignore"), TRITON_INTERPRET="1")
    assert codes == [0] * 40
    assert policy.startswith('set_policy(): "eager; bias_gelu=triton"'), "a child's policy is the child's"
    assert not reached
    assert same


HELD = f"""
    import json, os, signal, threading, torch, fusedops
    torch.set_num_threads(1)
    fusedops.bias_gelu(torch.ones(3)){ALL_LOCKS}
    held, done = threading.Event(), threading.Event()
    def hold():
        with all_locks():
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


SLOW = """
import time
import fusedops

@fusedops.hookimpl
def fusedops_backend():
    time.sleep(1.0)
    return fusedops.Backend("slow", ("cpu",), -5, ())
"""

FORKED_WHILE_LOADING = """
    import json, os, signal, threading, time, torch, fusedops
    torch.set_num_threads(1)
    loading = threading.Thread(target=fusedops.backends)
    loading.start()
    time.sleep(0.5)
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        served = []
        thread = threading.Thread(target=lambda: served.append(fusedops.bias_gelu(torch.ones(2))))
        thread.start()
        thread.join()
        os._exit(0 if served else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    loading.join()
    print(json.dumps(code))
"""


def test_a_child_forked_while_plugins_load_can_call_an_op(python: Any, distribution: Any) -> None:
    site = distribution("slow-dist", {"slow": "slow_mod"}, slow_mod=SLOW)
    assert python(FORKED_WHILE_LOADING, site, flags=("-W", "ignore")) == 0


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
    source = fusedops.get_policy().source_for("bias_gelu")
    value = fusedops.bias_gelu(torch.full((4,), float(n)))
    try:
        fusedops.bias_gelu(torch.ones(3), backend="npu")
        error = None
    except fusedops.NoBackendError as raised:
        error = raised
    return source.channel, source.text, value.tolist(), error

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
def test_workers_of_a_data_loader_and_spawned_ones(how: str, wanted: Any, tmp_path: pathlib.Path, program: Any) -> None:
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    done = program(script, how, FUSEDOPS_BACKEND="eager", FUSEDOPS_FALLBACK="raise")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == wanted

"""Forks while other threads call ops, and load and probe backends: ``python -m tests.fuzz.forks SEED``.

Each child calls every op on a thread of its own, beside the main one, and must end by itself with the right results.
All modules are imported before: a child of a fork during an import waits for ever for that module, whose lock Python
does not renew (seen with 3.11).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import replace

from tests.fuzz.machine import prepare

CHILDREN = 12
_SECONDS = 40  # a child that hangs is killed by its alarm


def main(seed: int) -> int:
    """Fork; return the number of children that failed."""
    warnings.simplefilter("ignore")
    dice = random.Random(seed)
    import torch

    torch.set_num_threads(1)
    import fusedops
    from fusedops.testing import OPS, arguments, shrunk

    cases = [(shrunk(op.evidence.cases[0], 256, rows=1), op.evidence.cases[0]) for op in OPS.values()]
    # a cut case may be invalid: its groups divide no channels
    made = [[arguments(op, case, torch.float32) for case in each] for op, each in zip(OPS.values(), cases)]
    calls = [cut if op.invalid(cut) is None else whole for op, (cut, whole) in zip(OPS.values(), made)]
    wants = [op.as_tuple(op.reference(*args)) for op, args in zip(OPS.values(), calls)]
    prepare()
    import loopback

    fusedops.stats()
    _every_op(calls, wants)
    go = threading.Event()

    def load(name: str) -> None:
        plugin = replace(loopback.backend(name), priority=50, probe=lambda: time.sleep(0.003))
        go.wait()
        while go.is_set():
            fusedops.register(plugin)
            _every_op(calls, wants)  # probes it: its priority is the highest
            with fusedops.use(f"{name}", fallback="silent"):
                _every_op(calls, wants)
            fusedops.backends()
            fusedops.unregister(name)

    threads = [threading.Thread(target=load, args=(f"passing_{n}",), daemon=True) for n in range(2)]
    for thread in threads:
        thread.start()
    go.set()
    children: list[int] = []
    for _ in range(CHILDREN):
        time.sleep(dice.choice((0.0, 0.001, 0.01, 0.05, 0.2)) * dice.random())
        child = os.fork()
        if child == 0:
            os._exit(_child(calls, wants))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    go.clear()
    for thread in threads:
        thread.join(60)
    print(f"children ended with {codes}", file=sys.stderr)
    return sum(code != 0 for code in codes)


def _child(calls: list[tuple[object, ...]], wants: list[tuple[object, ...]]) -> int:
    import faulthandler

    faulthandler.dump_traceback_later(_SECONDS - 5)
    signal.alarm(_SECONDS)
    failures: list[str] = []

    def run() -> None:
        try:
            _every_op(calls, wants)
        except BaseException:
            failures.append(traceback.format_exc())

    thread = threading.Thread(target=run)
    thread.start()
    run()
    thread.join()
    print("\n".join(failures), file=sys.stderr, flush=True)
    return len(failures)


def _every_op(calls: list[tuple[object, ...]], wants: list[tuple[object, ...]]) -> None:
    import torch

    from fusedops.testing import OPS

    for op, args, want in zip(OPS.values(), calls, wants):
        for y, right in zip(op.as_tuple(op.call_public(*args)), want):
            if y is not None:  # an argument that the call would write, which it has not
                torch.testing.assert_close(y, right, rtol=1e-4, atol=1e-4, equal_nan=True)


if __name__ == "__main__":
    sys.exit(min(main(int(sys.argv[1])), 100))

"""Runs of many threads and processes: each program in a process of its own, again and again with another seed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter

from tests.fuzz.machine import ROOT

PROGRAMS = {
    "threads": "16 threads under changing policies and backends",
    "forks": "forks while backends load",
    "exits": "the end of the interpreter while kernels run",
}
_LIMIT = 300.0  # seconds


def run(seconds: float, seed: int, rounds: int | None = None) -> int:
    """Run the programs in turn, print what failed and the counts, and return 1 where one failed.

    Args:
        seconds: how long.
        seed: of the first round.
        rounds: how many rounds of all programs instead.
    """
    end = time.monotonic() + seconds
    counts: Counter[tuple[str, str]] = Counter()
    at = 0
    while at < rounds if rounds is not None else time.monotonic() < end:
        for name in PROGRAMS:
            outcome, text = _once(name, seed + at)
            counts[name, outcome] += 1
            if outcome != "clean":
                print(f"---- {outcome}: python -m tests.fuzz.{name} {seed + at}\n{text}", file=sys.stderr, flush=True)
        at += 1
    for name, what in PROGRAMS.items():
        tally = ", ".join(f"{counts[name, outcome]} {outcome}" for outcome in ("clean", "wrong", "crash", "hang"))
        print(f"{what}: {tally}")
    return 1 if any(outcome != "clean" for _, outcome in counts) else 0


def _once(name: str, seed: int) -> tuple[str, str]:
    command = [sys.executable, "-X", "faulthandler", "-W", "ignore", "-m", f"tests.fuzz.{name}", str(seed)]
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT)
    except subprocess.TimeoutExpired as late:
        return "hang", str(late)
    text = (done.stdout + done.stderr)[-4000:]
    if done.returncode < 0 or "Fatal Python error" in done.stderr:
        return "crash", f"the process ended with {done.returncode}\n{text}"
    if done.returncode:
        return "wrong", text
    return ("wrong", text) if name == "exits" and done.stderr.strip() else ("clean", "")

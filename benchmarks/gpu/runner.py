"""Runs steps: each has a log and a limit of time, and none depends on another one's success."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.steps import Step

_GRACE = 5.0  # seconds from the interrupt to the end of a step's processes


class Outcome(NamedTuple):
    """What became of a step. ``status``: "passed", "failed", "stopped" at its limit, or "skipped"."""

    step: str
    status: str
    seconds: float
    detail: str

    @property
    def is_bad(self) -> bool:
        """True for what makes the exit code 1."""
        return self.status in ("failed", "stopped")


def run_all(
    phases: Sequence[Sequence[Step]], environment: Mapping[str, str], logs: Path, cwd: Path, seconds: float
) -> Iterator[Outcome]:
    """Run the phases one after the other, the steps of each at the same time, and yield the outcomes as they come.

    Args:
        phases: the steps.
        environment: of every step.
        logs: a folder; each step writes NAME.txt.
        cwd: where the steps run.
        seconds: the limit of all of them; what is left over at its end is skipped.
    """
    logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    for phase in phases:
        with ThreadPoolExecutor(len(phase)) as pool:
            yield from pool.map(lambda step: _run(step, environment, logs, cwd, end), phase)


def log_of(logs: Path, step: str) -> Path:
    """Return the log of a step."""
    return logs / f"{step.replace(' ', '-').replace('/', '-of-')}.txt"


def _run(step: Step, environment: Mapping[str, str], logs: Path, cwd: Path, end: float) -> Outcome:
    start = time.monotonic()
    limit = min(step.seconds, end - start)
    if step.needs and shutil.which(step.needs) is None:
        return Outcome(step.name, "skipped", 0.0, f"{step.needs} is not installed")
    if limit <= 0:
        return Outcome(step.name, "skipped", 0.0, "no time is left")
    with log_of(logs, step.name).open("wb") as log:
        process = subprocess.Popen(
            step.command,
            cwd=cwd,
            env={**environment, **step.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            _end(process)
            return Outcome(step.name, "stopped", time.monotonic() - start, f"after {limit:.0f} s, its limit")
    detail = "" if code == 0 else f"exit status {code}"
    return Outcome(step.name, "failed" if code else "passed", time.monotonic() - start, detail)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the processes of a step, so that pytest and the benchmark report; then kill them."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also what the interrupt has left behind
    process.wait()

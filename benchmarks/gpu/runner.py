"""Runs steps: each has a log and a limit of time, and none depends on another one's success."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import NamedTuple

from benchmarks.gpu.steps import BROKEN, Step

_GRACE = 5.0  # seconds from the interrupt to the kill, and from that to the end of the waiting
_TURN = 0.05  # seconds between two looks at the processes


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
    phases: Sequence[Sequence[Step]],
    environment: Mapping[str, str],
    logs: Path,
    cwd: Path,
    seconds: float,
    interrupted: Event | None = None,
) -> Iterator[Outcome]:
    """Run the phases one after the other, the steps of each at the same time, and yield the outcomes as they come.

    Args:
        phases: the steps.
        environment: of every step.
        logs: a folder; each step writes NAME.txt.
        cwd: where the steps run.
        seconds: the limit of all of them; what is left over at its end is skipped.
        interrupted: once it is set, steps that run are stopped and the others are skipped.
    """
    logs.mkdir(parents=True, exist_ok=True)
    interrupted = interrupted or Event()
    end = time.monotonic() + seconds
    for phase in phases:
        running: list[_Running] = []
        try:
            for step in phase:
                limit = min(step.seconds, end - time.monotonic())
                reason = _not_run(step, limit, interrupted)
                if reason:
                    yield Outcome(step.name, "skipped", 0.0, reason)
                else:
                    running.append(_Running(step, environment, log_of(logs, step.name), cwd, limit))
            while running:
                if interrupted.is_set():
                    for each in running:
                        each.stop("interrupted")
                done = [(each, outcome) for each in running if (outcome := each.outcome()) is not None]
                running = [each for each in running if each not in [one for one, _ in done]]
                yield from (outcome for _, outcome in done)
                time.sleep(0 if done else _TURN)
        finally:  # the caller has ended early
            for each in running:
                each.kill()


def log_of(logs: Path, step: str) -> Path:
    """Return the log of a step."""
    return logs / f"{step.replace(' ', '-').replace('/', '-of-')}.txt"


def _not_run(step: Step, limit: float, interrupted: Event) -> str:
    """Return why a step is skipped; "" if it is not."""
    if interrupted.is_set():
        return "interrupted"
    if step.needs and shutil.which(step.needs) is None:
        return f"{step.needs} is not installed"
    return "" if limit > 0 else "no time is left"


class _Running:
    """The processes of a step. From its limit on, they get an interrupt, so that pytest reports, and then a kill."""

    def __init__(self, step: Step, environment: Mapping[str, str], log: Path, cwd: Path, limit: float) -> None:
        self._step, self._environment, self._log, self._cwd = step, environment, log, cwd
        self._start = time.monotonic()
        self._deadline = self._start + limit
        self._reason = f"after {limit:.0f} s, its limit"
        self._signals = [signal.SIGINT, signal.SIGKILL]
        self._starts = 0
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes] | OSError:
        self._starts += 1
        try:
            with self._log.open("ab") as log:
                return subprocess.Popen(
                    self._step.command,
                    cwd=self._cwd,
                    env={**self._environment, **self._step.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            return error

    def outcome(self) -> Outcome | None:
        """Return what became of the step, or None while it runs."""
        if isinstance(self._process, OSError):
            return self._became("failed", str(self._process))
        code = self._process.poll()
        if code is None:
            if time.monotonic() < self._deadline:
                return None
            if self._signals:
                self._send(self._signals.pop(0))
                self._deadline = time.monotonic() + _GRACE
                return None
            return self._became("stopped", f"{self._reason}; process {self._process.pid} does not end")
        self._send(signal.SIGKILL)  # what the step has left behind
        if len(self._signals) < 2:
            return self._became("stopped", self._reason)
        if (code < 0 or code == BROKEN) and self._starts <= self._step.restarts:
            self._process = self._started()
            return None
        restarted = f", after {self._starts - 1} restarts" if self._starts > 1 else ""
        if code or restarted:
            return self._became("failed", f"exit status {code}{restarted}")
        return self._became("passed", "")

    def stop(self, reason: str) -> None:
        """End the step, unless that is under way."""
        if len(self._signals) == 2:
            self._deadline, self._reason = time.monotonic(), reason

    def kill(self) -> None:
        """End the step at once."""
        self._send(signal.SIGKILL)

    def _became(self, status: str, detail: str) -> Outcome:
        return Outcome(self._step.name, status, time.monotonic() - self._start, detail)

    def _send(self, which: signal.Signals) -> None:
        if not isinstance(self._process, OSError):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS has the second for zombies
                os.killpg(self._process.pid, which)

"""A hint about threads that spin while other programs need the cores."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of Linux's control groups, version 2


def usable_cores() -> int:
    """Return how many cores this process may use, by its affinity and a container's quota, which torch ignores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = QUOTA.read_text("ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))  # without a quota the text is "max"
    return cores


def spinning_threads() -> str:
    """Return a sentence where threads of OpenMP spin on cores that other programs need; empty elsewhere.

    After each parallel region the threads of libgomp and libomp wait in a loop. On a machine with a load of 14 on 2
    cores, a batch of 4 prompts took 11 times as long as with ``OMP_WAIT_POLICY=passive``. OpenMP reads the variable
    once, when torch is imported.
    """
    if os.environ.get("OMP_WAIT_POLICY") or os.environ.get("OMP_NUM_THREADS") == "1" or not hasattr(os, "getloadavg"):
        return ""
    load, cores = os.getloadavg()[0], usable_cores()
    if cores == 1 or load < cores:
        return ""
    return (
        f"got a load of {load:.1f} on {cores} cores and no OMP_WAIT_POLICY: torch's idle threads spin on cores that "
        f"other programs need; to fix: set OMP_WAIT_POLICY=passive before Python starts"
    )


@cache
def log_spinning_threads() -> None:
    """Log the sentence of :func:`spinning_threads` once in a process, as a warning of the logger ``fusedops``.

    It is not a FusedOpsWarning: with ``python -W error`` the load of the machine would stop a program.
    """
    if text := spinning_threads():
        logging.getLogger("fusedops").warning(text)

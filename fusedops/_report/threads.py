"""A hint about threads that spin while other programs need the cores."""

from __future__ import annotations

import os


def spinning_threads(cores: int) -> str:
    """Return a sentence where threads of OpenMP spin on cores that other programs need; empty elsewhere.

    After each parallel region the threads of libgomp and libomp wait in a loop. On a machine with a load of 14 on 2
    cores, a batch of 4 prompts took 11 times as long as with ``OMP_WAIT_POLICY=passive``. OpenMP reads the variable
    once, when torch is imported.

    Args:
        cores: that this process may use.
    """
    if os.environ.get("OMP_WAIT_POLICY") or os.environ.get("OMP_NUM_THREADS") == "1" or not hasattr(os, "getloadavg"):
        return ""
    load = os.getloadavg()[0]
    if cores == 1 or load < cores:
        return ""
    return (
        f"got a load of {load:.1f} on {cores} cores and no OMP_WAIT_POLICY: torch's idle threads spin on cores that "
        f"other programs need; to fix: set OMP_WAIT_POLICY=passive before Python starts"
    )

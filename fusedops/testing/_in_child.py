"""Functions run in a child of this process, for what ends a process."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import warnings
from collections.abc import Callable

import torch

_PATIENCE = 30.0  # seconds: a library may not run in a child at all


def ended_by_memory(possible: Callable[[], object], function: Callable[[], object]) -> bool:
    """Return True where the second function ends a child process by an access to memory that is not allowed.

    False where it does not, and where the first function does not return in a child: then nothing is known.
    """
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's, of threads: the child starts none
        child = os.fork()
    if not child:
        _run_and_end(possible, function, write)
    os.close(write)
    try:
        status = _waited(child)
        is_possible = bool(os.read(read, 1))
    finally:
        os.close(read)
    return is_possible and os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGSEGV, signal.SIGBUS)


def _run_and_end(possible: Callable[[], object], function: Callable[[], object], write: int) -> None:
    """Run both in the child, which has one of the process's threads."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        torch.set_num_threads(1)
        possible()
        os.write(write, b"1")
        function()
    finally:
        os._exit(0)


def _waited(child: int) -> int:
    """Return the status with which a child ended, of 0 for one that had to be killed."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 0

"""Counts of calls by backend, and the events of first uses.

A count costs a call one ``next`` of an ``itertools.count``, which is one step under Python's lock, so that no call is
lost between threads. Everything else happens at the first call of its kind.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import warnings
from copy import copy
from functools import partial
from typing import Any

from fusedops._plugins.record import PreparedKernel
from fusedops._plugins.registry import registry
from fusedops._report.direction import Direction, call_name
from fusedops._report.event import Count, Event, Refusal, Stats
from fusedops._report.foreign_text import error_text
from fusedops.errors import FusedOpsWarning

VARIABLE = "FUSEDOPS_STATS"
logger = logging.getLogger("fusedops")


class _Row:
    """A counter that plans share."""

    __slots__ = ("backend", "calls", "direction", "op", "refused", "zero")

    def __init__(self, op: str, direction: Direction, backend: str, refused: tuple[Refusal, ...]) -> None:
        self.op, self.backend = op, backend
        self.direction: Direction = direction
        self.refused = refused
        self.calls = itertools.count()
        self.zero = 0

    def total(self) -> int:
        """Return the calls so far."""
        return _number(repr(self.calls))


def _number(mark: str) -> int:
    """Return the number of a counter: an ``itertools.count`` shows it as text, where ``next`` would take it."""
    return int(mark[len("count(") : -1])


_rows: dict[Any, _Row] = {}
_used: dict[Any, object] = {}
_failed: dict[Any, object] = {}
_reading = threading.Lock()


def is_first(seen: dict[Any, object], key: Any) -> bool:
    """Return True for the first of all threads that asks for ``key``: setdefault is one step under Python's lock."""
    own = object()
    return seen.setdefault(key, own) is own


def counting(kernel: PreparedKernel, refused: tuple[Refusal, ...], device_type: str, policy: str) -> PreparedKernel:
    """Return a copy of ``kernel`` whose calls are counted as those before which ``refused`` were passed over."""
    row = _row(kernel.kernel.op, kernel.kernel.direction, kernel.backend, refused)
    event = Event("first use", row.op, row.direction, row.backend, device_type, policy, refused)
    result = copy(kernel)
    result.count = row.calls
    result.first_use = partial(_report_first_use, event)
    return result


def _row(op: str, direction: Direction, backend: str, refused: tuple[Refusal, ...]) -> _Row:
    key = (op, direction, backend, tuple((r.backend, r.constraint) for r in refused))
    return _rows.setdefault(key, _Row(op, direction, backend, refused))


def _report_first_use(event: Event) -> None:
    """Log and publish the first call of a backend's kernel, of all plans that have it."""
    if is_first(_used, (event.op, event.direction, event.backend)):
        refused = "".join(f"; not on {r.backend}: {r.reason.detail}" for r in event.refused)
        logger.info("%s runs on %s%s", call_name(event.op, event.direction), event.backend, refused)
        publish(event)


def publish(event: Event) -> None:
    """Send an event to every plugin that observes. What a plugin raises becomes a warning, and the call goes on."""
    for name, observe in registry.observers():
        try:
            observe(event=event)
        except Exception as error:
            if is_first(_failed, name):
                warnings.warn(
                    f"plugin {name!r}: got {error_text(error)} from its fusedops_observe, expected no "
                    f"exception; the call goes on; to fix: correct it, or call fusedops.unregister({name!r})",
                    FusedOpsWarning,
                    stacklevel=2,
                )


def forget_first_uses() -> None:
    """Report each first use again."""
    _used.clear()
    _failed.clear()


def _totals() -> list[tuple[_Row, int]]:
    """Return the rows with calls, and their number since the last reset."""
    with _reading:
        totals = [(row, row.total() - row.zero) for row in list(_rows.values())]
    return [(row, calls) for row, calls in totals if calls]


def stats() -> Stats:
    """Return the counts of this process's calls: by op, direction, backend, and the refusals before it.

    A call is counted when a kernel is selected and called: directly, in compiled code, or for a gradient. Second
    derivatives, forward mode and vmap compute the op's reference and are not counted. Calls with the same refusals are
    one row, with the reason of the first.

    >>> import torch, fusedops
    >>> fusedops.reset_stats()
    >>> y = fusedops.bias_gelu(torch.zeros(2), backend="eager")
    >>> print(fusedops.stats())
    bias_gelu: 1 call
        100 % ran eager (1)
    """
    counts = [Count(row.op, row.direction, row.backend, row.refused, calls) for row, calls in _totals()]
    return Stats(tuple(sorted(counts, key=lambda c: (c.op, c.direction != "forward", -c.calls, c.backend))))


def marks() -> list[str]:
    """Return where the counters are, for :func:`calls_since`."""
    return [repr(row.calls) for row in list(_rows.values())]


def calls_since(before: list[str]) -> dict[tuple[str, str, Direction], int]:
    """Return the number of calls since these marks by backend, op and direction, of the kernels that were called."""
    calls: dict[tuple[str, str, Direction], int] = {}
    rows = list(_rows.values())  # they are added only
    for row, mark in zip(rows, before + ["count(0)"] * (len(rows) - len(before))):
        if repr(row.calls) != mark:
            key = (row.backend, row.op, row.direction)
            calls[key] = calls.get(key, 0) + row.total() - _number(mark)
    return calls


def reset_stats() -> None:
    """Set all counts to zero.

    >>> import fusedops
    >>> fusedops.reset_stats()
    >>> print(fusedops.stats())
    no calls counted
    """
    with _reading:
        for row in list(_rows.values()):
            row.zero = row.total()


def _print_at_exit() -> None:
    counts = stats()
    if counts.counts:
        print(f"fusedops, calls by backend ({VARIABLE}):\n{counts}", file=sys.stderr)


def _start_in_child() -> None:
    global _reading
    _reading = threading.Lock()  # another thread of the parent may have held it
    reset_stats()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_start_in_child)
_value = os.environ.get(VARIABLE, "").strip()  # this module is loaded by the first call, not by the import
if _value == "1":
    atexit.register(_print_at_exit)
elif _value not in ("", "0"):
    warnings.warn(
        f"environment: got {VARIABLE}={_value!r}, which has no effect, expected 1 or 0; to fix: set it to 1 to print "
        f"the counts of calls at the end, or unset it",
        FusedOpsWarning,
        stacklevel=2,
    )

"""What ran: counts of calls by backend, and a word to the log and to observing plugins at each first use and fallback.

A count costs a call one ``next`` of an ``itertools.count``, which is one step under Python's lock, so that threads lose
none. Everything else happens at the first call of its kind.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

from fusedops._constraint import Reason
from fusedops._entry import Entry
from fusedops._op import Direction
from fusedops._registry import registry
from fusedops.errors import FusedOpsWarning

VARIABLE = "FUSEDOPS_STATS"
logger = logging.getLogger("fusedops")


@dataclass(frozen=True)
class Refusal:
    """A backend that was passed over.

    Attributes:
        backend: its name.
        limit: the limit that refused, in words; the reason's own words where it was no limit.
        reason: the reason, with the values of the first such call.
    """

    backend: str
    limit: str
    reason: Reason

    def to_dict(self) -> dict[str, Any]:
        """The refusal as JSON-ready data."""
        return {"backend": self.backend, "limit": self.limit, "reason": self.reason.to_dict()}


@dataclass(frozen=True)
class Event:
    """What a ``fusedops_observe`` hook is told.

    Attributes:
        kind: "first use" of a backend for an op and direction in this process, or "fallback", once for each op,
            direction, refusing backend and code of reason.
        op: the op's name.
        direction: "forward" or "backward".
        backend: who serves.
        device_type: of the call's tensors.
        policy: the policy in force, in words.
        refused: who was passed over and why; of a fallback the one whose turn it was.
    """

    kind: Literal["first use", "fallback"]
    op: str
    direction: Direction
    backend: str
    device_type: str
    policy: str
    refused: tuple[Refusal, ...]

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON-ready data."""
        return {**vars(self), "refused": [refusal.to_dict() for refusal in self.refused]}


@dataclass(frozen=True)
class Count:
    """One row of :func:`stats`: calls of an op that one backend served, the same limits having refused before it."""

    op: str
    direction: Direction
    backend: str
    refused: tuple[Refusal, ...]
    calls: int

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-ready data."""
        return {**vars(self), "refused": [refusal.to_dict() for refusal in self.refused]}


@dataclass(frozen=True)
class Stats:
    """Counts of calls, by op and direction, the most frequent first. ``str()`` is a table for a person."""

    counts: tuple[Count, ...]

    def to_dict(self) -> dict[str, Any]:
        """The counts as JSON-ready data."""
        return {"counts": [count.to_dict() for count in self.counts]}

    def __str__(self) -> str:
        if not self.counts:
            return "no calls counted"
        lines: list[str] = []
        for what, group in itertools.groupby(self.counts, lambda count: (count.op, count.direction)):
            rows = list(group)
            total = sum(count.calls for count in rows)
            lines.append(f"{_word(*what)}: {total} call{'s' * (total != 1)}")
            for count in rows:
                lines.append(f"  {100 * count.calls / total:5.3g} % ran {count.backend} ({count.calls})")
                lines += [f"          not {r.backend}: {r.reason.detail}" for r in count.refused]
        return "\n".join(lines)


class _Row:
    """A counter that plans share, and what of it was read or reset."""

    __slots__ = ("backend", "calls", "direction", "op", "reads", "refused", "zero")

    def __init__(self, entry: Entry, refused: tuple[Refusal, ...]) -> None:
        self.op, self.backend = entry.kernel.op, entry.backend
        self.direction: Direction = entry.kernel.direction
        self.refused = refused
        self.calls = itertools.count()
        self.reads = self.zero = 0

    def total(self) -> int:
        """Calls so far. To look at an ``itertools.count`` is to take one from it."""
        taken = next(self.calls)
        self.reads += 1
        return taken + 1 - self.reads


class _First:
    """Stands for an entry's count until its first call, which it tells of."""

    __slots__ = ("entry", "event", "row")

    def __init__(self, entry: Entry, row: _Row, event: Event) -> None:
        self.entry, self.row, self.event = entry, row, event

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.entry.count = self.row.calls
        count = next(self.row.calls)
        event = self.event
        mine = object()  # setdefault is one step under Python's lock: of threads that race, one tells
        if _used.setdefault((event.op, event.direction, event.backend), mine) is mine:
            logger.info("%s runs on %s%s", _word(event.op, event.direction), event.backend, _because(event.refused))
            tell(event)
        return count


_rows: dict[Any, _Row] = {}
_used: dict[tuple[str, str, str], object] = {}
_failed: set[str] = set()
_reading = threading.Lock()


def counted(entry: Entry, refused: tuple[Refusal, ...], device_type: str, policy: str) -> Entry:
    """A copy of ``entry`` whose calls are counted as those for which ``refused`` were passed over."""
    key = (entry.kernel.op, entry.kernel.direction, entry.backend, tuple((r.backend, r.limit) for r in refused))
    row = _rows.setdefault(key, _Row(entry, refused))
    made = copy(entry)
    event = Event("first use", row.op, row.direction, row.backend, device_type, policy, refused)
    made.count = _First(made, row, event)
    return made


def tell(event: Event) -> None:
    """Hands an event to every plugin that observes. What one raises is a warning, and not the call's business."""
    for name, observe in registry.observers():
        try:
            observe(event=event)
        except Exception as error:
            if name not in _failed:
                _failed.add(name)
                warnings.warn(
                    f"plugin {name!r}: its fusedops_observe raised {type(error).__name__}: {error}; the call goes on; "
                    f"mend it, or fusedops.unregister({name!r})",
                    FusedOpsWarning,
                    stacklevel=2,
                )


def forget_uses() -> None:
    """Lets each first use be told again. For tests."""
    _used.clear()
    _failed.clear()


def stats() -> Stats:
    """Counts of this process's calls: by op, direction, backend, and the limits that refused before it.

    A call is counted when a kernel is chosen and called, whatever the way to it: directly, compiled, in a gradient.
    Second derivatives, forward mode and vmap take the op's reference and are not counted. Where the same limits
    refused, calls are one row, with the reason of the first.
    """
    with _reading:
        found = [(row, row.total() - row.zero) for row in list(_rows.values())]
    counts = [Count(row.op, row.direction, row.backend, row.refused, calls) for row, calls in found if calls]
    return Stats(tuple(sorted(counts, key=lambda c: (c.op, c.direction != "forward", -c.calls, c.backend))))


def reset_stats() -> None:
    """Counts from zero again."""
    with _reading:
        for row in list(_rows.values()):
            row.zero = row.total()


def _word(op: str, direction: str) -> str:
    return op if direction == "forward" else f"{op} backward"


def _because(refused: tuple[Refusal, ...]) -> str:
    return "".join(f"; not on {r.backend}: {r.reason.detail}" for r in refused)


def _at_exit() -> None:
    found = stats()
    if found.counts:
        print(f"fusedops, calls by backend ({VARIABLE}):\n{found}", file=sys.stderr)


def _in_child() -> None:
    global _reading
    _reading = threading.Lock()  # another thread of the parent may have held it
    reset_stats()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_child)
_asked = os.environ.get(VARIABLE, "").strip()  # this module is loaded by the first call, not by the import
if _asked == "1":
    atexit.register(_at_exit)
elif _asked not in ("", "0"):
    warnings.warn(
        f"{VARIABLE}={_asked!r} has no effect; set it to 1 to have calls counted at the end, or unset it",
        FusedOpsWarning,
        stacklevel=2,
    )

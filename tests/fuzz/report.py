"""The counts of a run, and the failures."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_WAYS = ("forward", "backward")
_COLUMNS = ("forward", "backward", "invalid", "refused", "excused", "wrong", "crash", "hang")


@dataclass
class Report:
    """What happened in a run.

    Attributes:
        counts: by (op, the backend that the calls are aimed at, device) and column.
        served: by (op, direction, the backend that ran).
        failures: each kind of failure once.
        undetermined: elements that were not compared, as they depend on rounding.
    """

    counts: Counter[tuple[tuple[str, ...], str]] = field(default_factory=Counter)
    served: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    failures: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)
    undetermined: int = 0

    def ran(self, event: dict[str, Any]) -> None:
        """Count a call that is right."""
        target, outcome = tuple(event["target"]), event["outcome"]
        forward, backward = outcome["forward"], outcome["backward"]
        if forward in ("invalid", "refused"):
            self.counts[target, forward] += 1
            return
        self.counts[target, "forward"] += 1
        self.counts[target, "backward"] += bool(backward)
        self.counts[target, "excused"] += bool(outcome["excused"])
        self.served[target[0], "forward", forward] += 1
        if backward:
            self.served[target[0], "backward", backward] += 1
        self.undetermined += outcome["undetermined"]

    def failed(self, column: str, event: dict[str, Any]) -> None:
        """Count a call that is wrong, crashed or hung, and print the first one of its kind."""
        target = tuple(event["target"])
        self.counts[target, column] += 1
        key = (*target, column, event["kind"])
        if key in self.failures:
            return
        self.failures[key] = event
        lines = [
            f"---- {column}: {target[0]} on {target[1]}, device {target[2]}, seed {event['seed']}",
            f"# {json.dumps(event['message'])[1:-1][:1500]}",
            event["program"],
        ]
        print("\n".join(lines), file=sys.stderr, flush=True)

    def total(self, column: str) -> int:
        """Return the number of calls in a column."""
        return sum(count for (_, each), count in self.counts.items() if each == column)

    @property
    def failing(self) -> int:
        """The number of calls that failed."""
        return sum(map(self.total, ("wrong", "crash", "hang")))

    def __str__(self) -> str:
        targets = sorted({target for target, _ in self.counts})
        rows = [("op", "backend", "device", *_COLUMNS)]
        rows += [(*target, *(str(self.counts[target, column]) for column in _COLUMNS)) for target in targets]
        rows.append(("all", "", "", *(str(self.total(column)) for column in _COLUMNS)))
        widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        backends = sorted({backend for _, _, backend in self.served})
        by_backend: list[str] = []
        for backend in backends:
            runs = {way: sum(n for (_, w, b), n in self.served.items() if (w, b) == (way, backend)) for way in _WAYS}
            by_backend.append(f"{backend} {', '.join(f'{count} {way}' for way, count in runs.items())}")
        calls = sum(map(self.total, ("forward", "invalid", "refused"))) + self.failing
        lines += ["", f"served by: {'; '.join(by_backend)}"]
        lines += [f"elements that depend on rounding, not compared: {self.undetermined}"]
        lines += [f"{calls} calls: {self.total('wrong')} wrong, {self.total('crash')} crash, {self.total('hang')} hang"]
        return "\n".join(lines)

"""Counts of calls, and the events that observing plugins receive."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

from fusedops._report.direction import Direction, call_name
from fusedops._report.foreign_text import message
from fusedops._report.reason import Reason
from fusedops._report.table import html_table


@dataclass(frozen=True)
class Refusal:
    """A backend that did not take a call although it comes earlier in the order.

    Attributes:
        backend: its name.
        constraint: the violated constraint as text; the reason's detail where no constraint was violated.
        reason: the reason, with the values of the first such call.
    """

    backend: str
    constraint: str
    reason: Reason

    def to_dict(self) -> dict[str, Any]:
        """Return the refusal as JSON-ready data."""
        return {"backend": self.backend, "constraint": self.constraint, "reason": self.reason.to_dict()}


@dataclass(frozen=True)
class Event:
    """The argument of a ``fusedops_observe`` hook: the first use of a backend, or a fallback.

    Attributes:
        kind: "first use" of a backend for an op and direction in this process, or "fallback", once for each op,
            direction, refusing backend and reason code.
        op: the op's name.
        direction: "forward" or "backward".
        backend: the backend that serves the call.
        device_type: of the call's tensors.
        policy: the policy in effect, as text.
        refused: the backends that refused, and why; for a fallback, the refusing one.

    >>> import fusedops
    >>> event = fusedops.Event("first use", "bias_gelu", "forward", "eager", "cpu", "eager", ())
    >>> event.to_dict()["backend"]
    'eager'
    """

    kind: Literal["first use", "fallback"]
    op: str
    direction: Direction
    backend: str
    device_type: str
    policy: str
    refused: tuple[Refusal, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON-ready data."""
        return {**vars(self), "refused": [refusal.to_dict() for refusal in self.refused]}


@dataclass(frozen=True)
class Count:
    """One row of :func:`fusedops.stats`: the calls of an op that one backend served after the same refusals.

    ``backend`` is "torch" for small calls of an op, in a model of transformers after ``apply``, that are left to torch.
    """

    op: str
    direction: Direction
    backend: str
    refused: tuple[Refusal, ...]
    calls: int

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        return {**vars(self), "refused": [refusal.to_dict() for refusal in self.refused]}


@dataclass(frozen=True)
class Stats:
    """Counts of calls, by op and direction, the most frequent first. ``str()`` is a table.

    >>> import torch, fusedops
    >>> with fusedops.use("eager"):
    ...     fusedops.reset_stats()
    ...     y = fusedops.bias_gelu(torch.ones(2, 4))
    >>> fusedops.stats()
    bias_gelu: 1 call
        100 % ran eager (1)
    """

    counts: tuple[Count, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as JSON-ready data."""
        return {"counts": [count.to_dict() for count in self.counts]}

    def __str__(self) -> str:
        if not self.counts:
            return "no calls counted"
        lines: list[str] = []
        for name, group in itertools.groupby(self.counts, lambda count: call_name(count.op, count.direction)):
            rows = list(group)
            total = sum(count.calls for count in rows)
            lines.append(f"{name}: {total} call{'s' * (total != 1)}")
            for count in rows:
                lines.append(f"  {100 * count.calls / total:5.3g} % ran {count.backend} ({count.calls})")
                lines += [f"          not {r.backend}: {r.reason.detail}" for r in count.refused]
        return message("\n".join(lines))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows: list[tuple[object, ...]] = []
        for count in self.counts:
            refused = "; ".join(f"{r.backend}: {r.reason.detail}" for r in count.refused)
            rows.append((call_name(count.op, count.direction), count.backend, count.calls, refused))
        return html_table("calls by backend", ("call", "backend", "calls", "refused"), rows)

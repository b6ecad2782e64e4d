"""What verify finds: rows of comparisons, and mismatches with what reproduces them."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedops._op import Direction


@dataclass(frozen=True)
class Mismatch:
    """A result further from the other's than the op's tolerance allows. ``str()`` says which, by how much, what to do.

    Attributes:
        op: the op's name.
        direction: "forward" or "backward".
        backend: who served.
        against: who it was compared with.
        what: "output", or "gradient of " and a parameter.
        off: where and how it differs, in words.
        given: the call in words.
        ratio: the difference, in units of what is allowed; inf where it is none of size.
        kernel: the file and line of the kernel.
        arguments: the call's own arguments, in the order of the kernel: of backward, with what forward kept.
    """

    op: str
    direction: Direction
    backend: str
    against: str
    what: str
    off: str
    given: str
    ratio: float
    kernel: str
    arguments: tuple[Any, ...]

    @property
    def reproduce(self) -> str:
        """A line of Python that compares the same kernel on random numbers of the same shapes."""
        name = self.op if self.direction == "forward" else f"{self.op}_backward"
        call = ", ".join([*map(_source, self.arguments), f"backend={self.backend!r}"])
        block = f"with fusedops.verify(against={self.against!r})"
        return f"{block}: torch.manual_seed(0); torch.ops.fusedops.{name}({call})"

    def __str__(self) -> str:
        return (
            f"verify: the {self.what} of {self.op} by {self.backend} differs from {self.against}'s: {self.off}; needs "
            f"to be within the op's tolerance. Given {self.given}. Mend the kernel at {self.kernel}, or prefer another "
            f"backend. The call's own arguments are in .mismatch.arguments; to try random ones: {self.reproduce}"
        )


@dataclass
class Compared:
    """One row of a :class:`Verification`: results of one kind, of calls of one shape.

    Attributes:
        op: the op's name.
        backend: who served.
        what: "output", or "gradient of " and a parameter.
        given: the call in words.
        count: results compared.
        mismatches: those beyond the tolerance.
        worst: the largest difference, in units of what is allowed: up to 1 is within the tolerance.
    """

    op: str
    backend: str
    what: str
    given: str
    count: int = 0
    mismatches: int = 0
    worst: float = 0.0


class Verification:
    """What :func:`fusedops.verify` found. ``str()`` is a table for a person.

    Attributes:
        against: who was compared with.
        skipped: sampled calls that could not be compared, by the reason.
        worst: the mismatch that is off the most, or None.
    """

    def __init__(self, against: str) -> None:
        self.against = against
        self.skipped: Counter[str] = Counter()
        self.worst: Mismatch | None = None
        self._rows: dict[tuple[str, str, str, str], Compared] = {}
        self._lock = threading.Lock()  # CUDA's backward runs on a thread of its own

    @property
    def rows(self) -> list[Compared]:
        """By op, backend, kind of result and shape."""
        return sorted(self._rows.values(), key=lambda row: (row.op, row.backend, row.what, row.given))

    @property
    def mismatches(self) -> int:
        """How many results were beyond the tolerance."""
        return sum(row.mismatches for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The rows as JSON-ready data."""
        return {"against": self.against, "skipped": dict(self.skipped), "rows": [vars(row) for row in self.rows]}

    def add(self, op: str, backend: str, what: str, given: str, ratio: float) -> None:
        """Notes one comparison."""
        with self._lock:
            row = self._rows.setdefault((op, backend, what, given), Compared(op, backend, what, given))
            row.count += 1
            row.mismatches += ratio > 1
            row.worst = max(row.worst, ratio)

    def skip(self, why: str) -> None:
        """Notes a call that cannot be compared."""
        with self._lock:
            self.skipped[why] += 1

    def __str__(self) -> str:
        rows = self.rows
        count = sum(row.count for row in rows)
        lines = [f"verify against {self.against}: {count} results compared, {self.mismatches} beyond the tolerance"]
        before: tuple[str, str] | None = None
        for row in rows:
            if (row.op, row.backend) != before:
                before = row.op, row.backend
                lines.append(f"{row.op} by {row.backend}")
            beyond = f", {row.mismatches} beyond" if row.mismatches else ""
            lines.append(f"  {row.what}: {row.count} compared, at most {row.worst:.3g} of the tolerance{beyond}")
            lines.append(f"    {row.given}")
        lines += [f"not compared: {count}, {why}" for why, count in sorted(self.skipped.items())]
        if self.worst is not None:
            lines.append(f"the worst: {self.worst.off}")
            lines.append(f"  {self.worst.reproduce}")
        return "\n".join(lines)


def _source(value: object) -> str:
    """An argument as Python source: random numbers for a tensor's, but for a seed."""
    if not isinstance(value, Tensor):
        return repr(value)
    shape = tuple(value.shape)
    device = "" if value.is_cpu else f", device={str(value.device)!r}"
    if value.is_floating_point():
        return f"torch.randn({shape}, dtype={value.dtype}{device})"
    if value.dtype is torch.int64:
        return f"torch.tensor({value.tolist()}{device})"
    mask = f"torch.rand({shape}{device}) < 0.35"
    return mask if value.dtype is torch.bool else f"({mask}).to({value.dtype})"

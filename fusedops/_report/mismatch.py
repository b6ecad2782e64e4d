"""The results of verify: rows of comparisons, and mismatches with a line that reproduces them."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedops._report.direction import Direction
from fusedops._report.foreign_text import message
from fusedops._report.table import html_table


@dataclass(frozen=True)
class Mismatch:
    """A result that differs from the expected one by more than the op's tolerance, or in its form. ``str()`` describes
    it.

    Attributes:
        op: the op's name.
        direction: "forward" or "backward".
        backend: the backend that served the call.
        against: what it was compared with.
        result: "output y", "saved rstd", "gradient of x", or "input x" where the kernel writes an argument.
        difference: where and by how much it differs, as text.
        given: the call's arguments as text.
        ratio: the difference in units of the tolerance; inf where it has no size.
        kernel: the file and line of the kernel.
        arguments: the arguments of the kernel's call, in order; in backward with what forward saved.
        of_form: True where the form differs, not the numbers: type, dtype, shape, strides, device, or memory
            besides the result's own.

    >>> import torch, fusedops
    >>> x = torch.ones(2)
    >>> wrong = ("gradient of x", "element (0,) is 2, reference's 1", "x float32[2] on cpu", 9.0, "mine.py:3", (x,))
    >>> fusedops.Mismatch("bias_gelu", "backward", "mine", "reference", *wrong).result
    'gradient of x'
    """

    op: str
    direction: Direction
    backend: str
    against: str
    result: str
    difference: str
    given: str
    ratio: float
    kernel: str
    arguments: tuple[Any, ...]
    of_form: bool = False

    @property
    def reproduce(self) -> str:
        """A line of Python that compares the same kernel on random numbers of the same shapes."""
        name = self.op if self.direction == "forward" else f"{self.op}_backward"
        call = ", ".join([*map(_source, self.arguments), f"backend={self.backend!r}"])
        block = f"with fusedops.verify(against={self.against!r})"
        return f"{block}: torch.manual_seed(0); torch.ops.fusedops.{name}({call})"

    def __str__(self) -> str:
        if self.of_form:
            problem = self.difference
        else:
            problem = f"different from {self.against}'s ({self.difference}), expected it within the op's tolerance"
        return (
            f"verify: got the {self.result} of {self.op} by {self.backend} {problem}; to fix: correct the kernel at "
            f"{self.kernel}, or prefer another backend. Given {self.given}. The call's own arguments are in "
            f".mismatch.arguments; with random ones: {self.reproduce}"
        )


@dataclass
class Compared:
    """One row of a :class:`Verification`: the results of one kind, of calls of one shape.

    Attributes:
        op: the op's name.
        backend: the backend that served them.
        result: as in :class:`Mismatch`.
        given: the call's arguments as text.
        count: results compared.
        mismatches: those beyond the tolerance.
        worst: the largest difference, in units of the tolerance.
    """

    op: str
    backend: str
    result: str
    given: str
    count: int = 0
    mismatches: int = 0
    worst: float = 0.0


class Verification:
    """The results of :func:`fusedops.verify`. ``str()`` is a table.

    Attributes:
        against: what the results were compared with.
        skipped: calls whose numbers were not compared, by the reason.
        worst: the mismatch with the largest difference, or None.

    >>> import torch, fusedops
    >>> with fusedops.use("eager"), fusedops.verify("reference") as verification:
    ...     y = fusedops.bias_gelu(torch.ones(2, 4))
    >>> verification.mismatches
    0
    """

    def __init__(self, against: str) -> None:
        self.against = against
        self.skipped: Counter[str] = Counter()
        self.worst: Mismatch | None = None
        self._rows: dict[tuple[str, str, str, str], Compared] = {}
        self._lock = threading.Lock()  # CUDA's backward runs on its own thread

    @property
    def rows(self) -> list[Compared]:
        """The rows by op, backend, result and shape."""
        return sorted(self._rows.values(), key=lambda row: (row.op, row.backend, row.result, row.given))

    @property
    def mismatches(self) -> int:
        """The number of results beyond the tolerance."""
        return sum(row.mismatches for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the rows as JSON-ready data."""
        return {"against": self.against, "skipped": dict(self.skipped), "rows": [vars(row) for row in self.rows]}

    def add(self, op: str, backend: str, result: str, given: str, ratio: float) -> None:
        """Record one comparison."""
        with self._lock:
            row = self._rows.setdefault((op, backend, result, given), Compared(op, backend, result, given))
            row.count += 1
            row.mismatches += ratio > 1
            row.worst = max(row.worst, ratio)

    def skip(self, why: str) -> None:
        """Record a call whose numbers are not compared."""
        with self._lock:
            self.skipped[why] += 1

    def _headline(self) -> str:
        count = sum(row.count for row in self.rows)
        results = f"{count} result{'s' * (count != 1)} compared"
        return f"verify against {self.against}: {results}, {self.mismatches} beyond the tolerance"

    def __str__(self) -> str:
        lines = [self._headline()]
        before: tuple[str, str] | None = None
        for row in self.rows:
            if (row.op, row.backend) != before:
                before = row.op, row.backend
                lines.append(f"{row.op} by {row.backend}")
            beyond = f", {row.mismatches} beyond" if row.mismatches else ""
            lines.append(f"  {row.result}: {row.count} compared, at most {row.worst:.3g} of the tolerance{beyond}")
            lines.append(f"    {row.given}")
        lines += [f"not compared: {count}, {why}" for why, count in sorted(self.skipped.items())]
        if self.worst is not None:
            lines.append(f"the worst: {self.worst.result} {self.worst.difference}")
            lines.append(f"  {self.worst.reproduce}")
        return message("\n".join(lines))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(r.op, r.backend, r.result, r.count, r.mismatches, f"{r.worst:.3g}", r.given) for r in self.rows]
        rows += [("", "", "not compared", count, "", "", why) for why, count in sorted(self.skipped.items())]
        header = ("op", "backend", "result", "compared", "beyond", "worst / tolerance", "given")
        return html_table(self._headline(), header, rows)


def _source(value: object) -> str:
    """Return an argument as Python source: random numbers for a tensor's, except for integers, such as a seed."""
    if not isinstance(value, Tensor):
        return repr(value)
    shape = tuple(value.shape)
    device = "" if value.is_cpu else f", device={str(value.device)!r}"
    if value.is_floating_point():
        return f"torch.randn({shape}, dtype={value.dtype}{device})"
    if value.dtype in (torch.int64, torch.int32):
        dtype = ", dtype=torch.int32" if value.dtype is torch.int32 else ""
        return f"torch.tensor({value.tolist()}{dtype}{device})"
    mask = f"torch.rand({shape}{device}) < 0.35"
    return mask if value.dtype is torch.bool else f"({mask}).to({value.dtype})"

"""The outcome of a replacement in another library's program: what calls an op, what does not, and why."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from fusedops._report.table import html_table
from fusedops.errors import InvalidInputError

if TYPE_CHECKING:
    from torch.nn import Module

    from fusedops.integrations._benchmark import Benchmark

_WIDTH = 100  # columns of a table
_LEAST = 40  # of its last one


@dataclass(frozen=True)
class Row:
    """The modules of one class with the same outcome; or a function.

    Attributes:
        module: the name of their class, or of the function.
        op: the op that they call; empty where they are left.
        count: how many they are; of a function: the modules of Python that hold it.
        left: why they are left as they were; empty where they are replaced.
        family: of those that are left, the op that was tried.
        when: the mode in which they call the op, "training" or "evaluation"; empty where they call it in both.

    >>> from fusedops.integrations.transformers import Row
    >>> Row("LlamaRMSNorm", "rms_norm", 5)
    Row(module='LlamaRMSNorm', op='rms_norm', count=5, left='')
    """

    module: str
    op: str
    count: int
    left: str = ""
    family: str = field(default="", repr=False, compare=False)
    when: str = field(default="", repr=False)


def _op_cell(row: Row) -> str:
    """Return the op of a row; in parentheses where it was tried and left."""
    if not row.op:
        return f"({row.family})" if row.family else "-"
    return f"{row.op}, {row.when}" if row.when else row.op


class Applied:
    """The state of a model, or of a library, after a replacement. ``print`` shows it as a table.

    Attributes:
        model: the name of the model's class, or of the library.
        rows: one :class:`Row` for each class of modules and outcome.

    >>> from fusedops.integrations.transformers import Applied, Row
    >>> Applied("Tiny", [Row("TinyNorm", "rms_norm", 2), Row("OddNorm", "", 1, "it has buffers")], lambda: None)
    fusedops in Tiny: 2 rms_norm
      module    op        count  left, because
      TinyNorm  rms_norm  2
      OddNorm   -         1      it has buffers
    """

    def __init__(
        self,
        model: str,
        rows: Sequence[Row],
        remove: Callable[[], None],
        *,
        kind: str = "module",
        nothing: str = "",
        notes: Callable[[], Sequence[str]] | None = None,
        measure: tuple[Module, Callable[[], object]] | None = None,
    ) -> None:
        self.model = model
        self.rows = tuple(rows)
        self._notes = notes
        self._remove = remove
        self._header = (kind, "op", "count", "left, because")
        self._nothing = nothing
        self._measure = measure  # the model, and a function that makes the same replacements again

    @property
    def ops(self) -> dict[str, int]:
        """Return how many modules call each op."""
        counts: Counter[str] = Counter()
        for row in self.rows:
            if row.op:
                counts[row.op] += row.count
        return dict(counts)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what holds for some calls alone, and what has changed since."""
        return tuple(self._notes()) if self._notes is not None else ()

    def remove(self) -> None:
        """Undo every replacement, whichever call made it."""
        self._remove()

    def benchmark(self, batch: Any, *, seconds: float = 10.0, progress: bool | None = None) -> Benchmark:
        """Measure the model plain and applied, in turns, on this machine; leave it applied.

        A model in training, given a batch with labels, makes training steps (forward and backward, no optimizer); any
        other runs forward alone. Its gradients, buffers and torch's random numbers are as before.

        Args:
            batch: what the model takes: a dict of its arguments, a tuple of them, or one.
            seconds: the measuring time, about; at least three turns are measured.
            progress: shows the turns on stderr; None: where that is a terminal.

        Raises:
            InvalidInputError: the outcome is not of ``apply``, or the model returns no floating tensor.

        >>> import torch
        >>> from fusedops.integrations.transformers import apply
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(64))
        >>> measured = apply(model).benchmark(torch.ones(4, 64), seconds=0.01)
        >>> measured.call, measured.difference < 1e-5
        ('forward', True)
        """
        if self._measure is None:
            raise InvalidInputError(
                "benchmark: got the outcome of another function, whose way back is no plain model, expected that of "
                "apply; to fix: call apply(model).benchmark(batch)"
            )
        from fusedops.integrations._benchmark import benchmark

        model, again = self._measure
        states = {"plain": self._remove, "applied": again}
        shown = progress if progress is not None else sys.stderr.isatty()
        return benchmark(model, batch, states, self._title(), seconds, shown)

    def _title(self) -> str:
        counts = ", ".join(f"{count} {op}" for op, count in self.ops.items())
        return f"fusedops in {self.model}: {counts or 'nothing is replaced'}"

    def _cells(self) -> list[tuple[str, ...]]:
        return [(row.module, _op_cell(row), str(row.count), row.left) for row in self.rows]

    def __repr__(self) -> str:
        notes = [part for note in self.notes for part in textwrap.wrap(note, _WIDTH)]
        if not self.rows:
            title = f"{self._title()}; {self._nothing}" if self._nothing else self._title()
            return "\n".join([title, *notes])
        lines = [self._header, *self._cells()]
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        under = " " * sum(width + 2 for width in widths)
        texts: list[str] = []
        for *cells, left in lines:
            start = "".join(f"{cell:{width}}  " for cell, width in zip(cells, widths))
            wrapped = textwrap.wrap(left, max(_LEAST, _WIDTH - len(under))) or [""]
            texts += [f"{start if at == 0 else under}{part}".rstrip() for at, part in enumerate(wrapped)]
        return "\n".join(["\n  ".join([self._title(), *texts]), *notes])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return html_table(self._title(), self._header, self._cells()) + notes

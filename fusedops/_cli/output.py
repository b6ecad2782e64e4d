"""Text for a terminal: tables and labelled lines that wrap at its width, colours, warnings, JSON."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fusedops._report.foreign_text import message

if TYPE_CHECKING:
    from rich.table import Table

STYLES = {
    "ready": "green", "selected": "green", "pass": "green", "unavailable": "yellow", "refused": "yellow",
    "note": "yellow", "failed": "red", "problem": "red", "FAIL": "red",
}  # fmt: skip
JOINED = "\N{NO-BREAK SPACE}"  # a space at which no line is broken
_WIDTH = 80  # where the output is not a terminal and COLUMNS is not set
_LEAST = 20  # columns for the last text of a row


def width() -> int:
    """Return the number of columns: of the variable COLUMNS, else of the terminal, else 80."""
    return max(20, shutil.get_terminal_size((_WIDTH, 24)).columns)


def is_coloured() -> bool:
    """Return True where the output is a terminal that shows colours, and NO_COLOR is not set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout is not None and sys.stdout.isatty()  # pyright: ignore[reportUnnecessaryComparison]


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> None:
    """Print rows under a header.

    Args:
        header: the titles of the columns.
        rows: the cells. A cell whose text is a state, such as "ready", gets its colour.
        right: the columns that are aligned to the right.
    """
    from rich.table import Table  # not at import: rich takes 0.1 s

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column, title in enumerate(header):
        table.add_column(title, justify="right" if column in right else "left", overflow="fold")
    _print(table, rows)


def print_fields(rows: Sequence[Sequence[object]], indent: int = 0, least: Sequence[int] = ()) -> None:
    """Print labelled texts. The last cell of each row wraps beside its labels.

    Args:
        rows: the labels, then the text.
        indent: spaces before each line.
        least: the least width of each label, so that several blocks are aligned.
    """
    from rich.table import Table

    gap = 2 if not least else 1
    table = Table.grid(padding=(0, gap, 0, 0))
    left = width() - indent
    if indent:
        table.add_column(width=indent - gap, no_wrap=True)
    for column in range(len(rows[0]) - 1 if rows else 0):
        widest = max([*least[column : column + 1], *(len(str(row[column])) for row in rows)])
        left -= widest + gap
        table.add_column(overflow="fold", min_width=widest if left >= _LEAST else None)
    table.add_column(overflow="fold")
    wrapped = [[*row[:-1], "\n".join(_lines(str(row[-1]), max(left, _LEAST)))] for row in rows]
    _print(table, [["", *row] if indent else row for row in wrapped])


def _lines(text: str, columns: int) -> list[str]:
    """Return a text as lines. A line breaks at a space, not at one that does not break; a path, behind a "/"."""
    lines: list[str] = []
    for line in textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False) or [""]:
        while len(line) > columns and "/" in line[1:columns]:
            cut = line.rindex("/", 1, columns) + 1
            lines.append(line[:cut])
            line = line[cut:]
        lines.append(line.replace(JOINED, " "))
    return lines


def print_text(text: str = "") -> None:
    """Print a paragraph, wrapped at the width of the terminal."""
    print_fields([[text]]) if text else print()


def _print(table: Table, rows: Sequence[Sequence[object]]) -> None:
    from rich.console import Console
    from rich.text import Text

    for row in rows:
        table.add_row(*(Text(message(str(cell)), style=STYLES.get(str(cell).split(" ")[0], "")) for cell in row))
    coloured = is_coloured()
    # into a text, then print(): the stream's encoding and a closed pipe are handled in one place, main()
    buffer = io.StringIO()
    console = Console(
        file=buffer, width=width(), color_system="standard" if coloured else None, force_terminal=coloured,
        force_jupyter=False, legacy_windows=False,
    )  # fmt: skip
    console.print(table)
    lines = buffer.getvalue()
    print("\n".join(line.rstrip() for line in lines.rstrip("\n").split("\n")), flush=True)


def print_json(data: Any) -> None:
    """Print data as JSON, with ASCII characters alone."""
    print(json.dumps(data, indent=2))


def print_error(text: object) -> None:
    """Print an error on standard error, on one line."""
    _print_to_stderr(f"fusedops: {text}")


def print_warning(text: object) -> None:
    """Print a warning on standard error, on one line."""
    _print_to_stderr(f"fusedops: warning: {text}")


def _print_to_stderr(text: str) -> None:
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]  # closed: print would take stdout
        print(message(text), file=sys.stderr)

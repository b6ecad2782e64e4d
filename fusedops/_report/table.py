"""Rows as an HTML table, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from fusedops._report.foreign_text import message


def html_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return an HTML table; every text is escaped."""
    from html import escape  # 2 ms

    head = "".join(f"<th>{escape(title)}</th>" for title in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(message(str(cell)))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table>"

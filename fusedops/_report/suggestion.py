"""The nearest known name to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from fusedops._report.foreign_text import printable


def unknown_name(kind: str, name: str, known: Sequence[str], cutoff: float = 0.5) -> str:
    """Return the text of an error about a name that does not exist, with the nearest one that does.

    Args:
        kind: what the name stands for, such as "backend".
        name: as given. A name that differs in upper and lower case alone is the nearest.
        known: the names that exist.
        cutoff: how similar a name must be to be suggested, in [0, 1].
    """
    shown = printable(repr(name))
    if not known:
        return f"got {kind} {shown}, expected an installed {kind}, but there is none; to fix: pip install fusedops"
    by_lower = {each.lower(): each for each in reversed(known)}
    exact = by_lower.get(str(name).lower())
    near = [exact] if exact else difflib.get_close_matches(str(name), known, n=1, cutoff=cutoff)
    fix = f"write {near[0]!r}" if near else "use one of these names"
    return f"got {kind} {shown}, expected one of {', '.join(sorted(known))}; to fix: {fix}"

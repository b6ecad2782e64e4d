"""The nearest known name to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from fusedops._report.foreign_text import printable

TORCH_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "meta")  # those that a message names
# names that people use for a device type of torch
DEVICE_TYPES = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda"}


def unknown_name(kind: str, name: str, known: Sequence[str], cutoff: float = 0.7, fix: str = "") -> str:
    """Return the text of an error about a name that does not exist, with the nearest one that does.

    Args:
        kind: what the name stands for, such as "backend".
        name: as given.
        known: the names that exist.
        cutoff: how similar a name must be to be suggested, in [0, 1]. At 0.5, "npu" is suggested for "gpu".
        fix: what to do, where more is known than a similar name.
    """
    shown = printable(repr(name))
    if not known:
        return f"got {kind} {shown}, expected an installed {kind}, but there is none; to fix: pip install fusedops"
    near = nearest_name(str(name), known, cutoff)
    fix = fix or (f"write {near!r}" if near else "use one of these names")
    return f"got {kind} {shown}, expected one of {', '.join(sorted(known))}; to fix: {fix}"


def nearest_name(name: str, known: Sequence[str], cutoff: float = 0.7) -> str | None:
    """Return the name in another case, the shortest that contains it, the longest that begins it, or a similar one."""
    by_lower = {item.lower(): item for item in reversed(known)}
    lower = name.lower()
    if lower in by_lower:
        return by_lower[lower]
    by_word = {key.lstrip("-"): shown for key, shown in by_lower.items()}  # dashes make options look alike
    word = lower.strip().lstrip("-")
    if len(word) > 2:  # too many names contain one or two letters
        containing = [key for key in by_word if word in key]
        if containing:
            return by_word[min(containing, key=lambda key: (not key.startswith(word), len(key)))]
        begun = [key for key in by_word if len(key) > 2 and word.startswith(key) and " " not in word]  # q4_k_m
        if begun:
            return by_word[max(begun, key=len)]
    swapped = [each for each in by_word if sorted(each) == sorted(word)]  # "cup": of three letters, two are too few
    similar = swapped or difflib.get_close_matches(word, by_word, 1, cutoff)
    return by_word[similar[0]] if similar else None

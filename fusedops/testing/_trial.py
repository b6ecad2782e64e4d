"""One case of one check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """One case of a check.

    Attributes:
        case: its name, one of a kind within the check.
        run: raises AssertionError with what was seen; whatever else it raises is the kernel's.
        excuse: the deviation that a backend may declare to differ here.
    """

    case: str
    run: Callable[[], None]
    excuse: str = ""

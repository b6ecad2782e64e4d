"""One case of one check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """One case of a check.

    Attributes:
        case: its name, unique within the check.
        run: raises AssertionError with what differs; any other exception comes from the kernel.
        excuse: the deviation that excuses this case, where the backend declares it.
    """

    case: str
    run: Callable[[], object]
    excuse: str = ""

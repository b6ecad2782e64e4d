"""Failures of the kit's cases, and their report: one block for each cause, with a count of the other cases."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fusedops._report.foreign_text import error_text, printable

_LINES, _CHARACTERS = 10, 1000  # of what was observed: an exception of torch may print whole tensors
_NO_EXCEPTION = "a call that the constraints accept raises nothing"
# what differs between cases of one cause: shapes, numbers, dtypes
_SHAPE = re.compile(r"[(\[](?:\d+(?:, ?)?)*[)\]]")
_NUMBER = re.compile(r"(?<![A-Za-z_])[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf)\b")
_DTYPE = re.compile(r"\b(?:float|bfloat|u?int)\d+\b")


class RuleError(AssertionError):
    """A case that fails by a rule that every check has, such as the layout of results.

    Args:
        seen: what was observed and what was expected.
        rule: the sentence of the contract.
    """

    def __init__(self, seen: str, rule: str) -> None:
        super().__init__(seen)
        self.rule = rule


@dataclass(frozen=True)
class Failure:
    """A case that failed.

    Attributes:
        case: its name.
        seen: what was observed and what was expected, in one sentence; an exception is cut after 10 lines.
        contract: the sentence of the contract that does not hold.
        reproduce: a command that runs this case alone.
        traceback: where it was raised, with the whole text of the exception.

    >>> from fusedops import testing
    >>> testing.Failure("x dim -1 = 80", "got no result", "each call has a result", "python -c ...").case
    'x dim -1 = 80'
    """

    case: str
    seen: str
    contract: str
    reproduce: str
    traceback: str = ""

    @property
    def cause(self) -> str:
        """The text that failures of one cause have in common: ``seen`` without its shapes, numbers and dtypes."""
        text = _DTYPE.sub("dtype", _SHAPE.sub("(#)", self.seen))
        return _NUMBER.sub("#", text)


def observed(error: Exception, contract: str) -> tuple[str, str]:
    """Return what a failed case observed, for a person, and the sentence of the contract that does not hold.

    Args:
        error: AssertionError for a case that differs; any other is the kernel's.
        contract: the sentence of the check.
    """
    if isinstance(error, RuleError):
        return _cut(str(error)), error.rule
    if isinstance(error, AssertionError):
        return _cut(str(error)), contract
    return _cut(f"raised {error_text(error)}"), _NO_EXCEPTION


def _cut(text: str) -> str:
    """Return a text of at most 10 lines and 1000 characters, without control characters."""
    lines = printable(text, _CHARACTERS).splitlines()
    more = len(text.splitlines()) - _LINES
    return "\n".join(lines[:_LINES]) + (f"\n... and {more} more lines" if len(lines) > _LINES else "")


@dataclass(frozen=True)
class Cause:
    """The failures of one cause.

    Attributes:
        check: the check of the first one, ``op/direction/name``.
        first: that failure.
        others: the number of other failures, by check.
    """

    check: str
    first: Failure
    others: Counter[str]

    @property
    def also(self) -> str:
        """The other cases in one sentence, or an empty text."""
        count = sum(self.others.values())
        if not count:
            return ""
        of_checks = ", ".join(f"{check} {number}" for check, number in self.others.items())
        return f"{count} more {'case' if count == 1 else 'cases'} with this message: {of_checks}"


def causes(failures: Iterable[tuple[str, Failure]]) -> list[Cause]:
    """Return the causes of failures, each (check, failure), in their order."""
    found: dict[str, Cause] = {}
    for check, failure in failures:
        cause = found.get(failure.cause)
        if cause is None:
            found[failure.cause] = Cause(check, failure, Counter())
        else:
            cause.others[check] += 1
    return list(found.values())

"""The texts of what is refused, and of what Megatron's own code computes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

from fusedops.errors import FusedOpsWarning, InvalidInputError


class Needed(NamedTuple):
    """A setting of Megatron's config that a module here needs, and the fix where it is another."""

    name: str
    value: Any
    fix: str


def check(owner: str, config: Any, needed: Iterable[Needed]) -> None:
    """Raise for the first setting of a config that is not the needed one. A version without a setting is right.

    Raises:
        InvalidInputError: a setting is another.
    """
    for name, value, fix in needed:
        given = getattr(config, name, value)
        if given != value:
            raise refusal(owner, f"{name} = {given!r}", repr(value), fix)


def refusal(owner: str, given: str, needed: str, fix: str) -> InvalidInputError:
    """Return the error for a setting that cannot be served.

    >>> refusal("Norm", "a", "b", "pass b")
    InvalidInputError('fusedops.integrations.megatron: Norm: got a, expected b; to fix: pass b')
    """
    return InvalidInputError(f"fusedops.integrations.megatron: {owner}: got {given}, expected {needed}; to fix: {fix}")


def warn_left(owner: str, given: str, needed: str, fix: str) -> None:
    """Warn that Megatron's own code computes what no op here does."""
    warnings.warn(
        f"fusedops.integrations.megatron: {owner}: got {given}, expected {needed}; Megatron's own code computes it; "
        f"to fix: {fix}",
        FusedOpsWarning,
        stacklevel=3,
    )

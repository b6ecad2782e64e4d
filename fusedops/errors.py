"""The exceptions and warnings of fusedops. Every message has the form "got X, expected Y; to fix: Z"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedops._report.foreign_text import message

if TYPE_CHECKING:
    from fusedops._report.decision import Decision
    from fusedops._report.mismatch import Mismatch

__all__ = [
    "FallbackWarning",
    "FusedOpsError",
    "FusedOpsWarning",
    "InvalidInputError",
    "MismatchError",
    "NoBackendError",
    "PluginError",
    "PolicyError",
]


class FusedOpsError(Exception):
    """The base of every error that fusedops itself raises. A kernel's own error reaches the user unchanged.

    The text has no control characters and no endless lines, whatever the values in it have.
    """

    def __str__(self) -> str:
        return message(super().__str__())


class InvalidInputError(FusedOpsError, ValueError):
    """An argument violates a constraint of the op, on every backend. Raised before anything runs."""


class PolicyError(FusedOpsError, ValueError):
    """A policy text is invalid, or names an unknown backend or op; or ``use()`` blocks were left out of order."""


class PluginError(FusedOpsError):
    """A plugin is invalid: its import failed, its name is taken, or a kernel does not match the op."""


class NoBackendError(FusedOpsError):
    """No backend that the policy allows takes this call.

    Attributes:
        decision: the whole decision, with every candidate and its reasons.
    """

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.refusal_text())
        self.decision = decision

    def __reduce__(self) -> tuple[type[NoBackendError], tuple[Decision]]:
        return type(self), (self.decision,)  # worker processes pickle it; the message is built again


class MismatchError(FusedOpsError):
    """Under :func:`fusedops.verify`, a kernel's result differs from the expected one by more than the tolerance.

    Attributes:
        mismatch: what was compared, the difference, and the call's own arguments.
    """

    def __init__(self, mismatch: Mismatch) -> None:
        super().__init__(str(mismatch))
        self.mismatch = mismatch

    def __reduce__(self) -> tuple[type[MismatchError], tuple[Mismatch]]:
        return type(self), (self.mismatch,)  # see NoBackendError


class FusedOpsWarning(UserWarning):
    """The base of every warning of fusedops. Its text is made fit as that of :class:`FusedOpsError`."""

    def __str__(self) -> str:
        return message(super().__str__())


class FallbackWarning(FusedOpsWarning):
    """A call was served by another backend than the preferred one. Given once per (op, backend, reason code)."""

"""Everything fusedops raises or warns with. Each text says what was given, what is needed, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusedops._decision import Decision
    from fusedops._verification import Mismatch

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
    """Base of every error that fusedops itself raises. A kernel's own error reaches the user unchanged."""


class InvalidInputError(FusedOpsError, ValueError):
    """An argument breaks the op's contract on every backend. Raised before anything runs."""


class PolicyError(FusedOpsError, ValueError):
    """A policy text, or the name of a backend or op in it, is not understood."""


class PluginError(FusedOpsError):
    """A backend plugin does not fit: its import failed, its name is taken, or a kernel differs from the op."""


class NoBackendError(FusedOpsError):
    """No backend that the policy allows takes this call.

    Attributes:
        decision: the whole decision, with every candidate and its reasons.
    """

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.refusal_text())
        self.decision = decision

    def __reduce__(self) -> tuple[type[NoBackendError], tuple[Decision]]:
        return type(self), (self.decision,)  # pickled by worker processes; the message is made anew


class MismatchError(FusedOpsError):
    """Under :func:`fusedops.verify`: a kernel's result is further from the other's than the op's tolerance allows.

    Attributes:
        mismatch: what was compared, by how much it is off, and the call's own arguments.
    """

    def __init__(self, mismatch: Mismatch) -> None:
        super().__init__(str(mismatch))
        self.mismatch = mismatch

    def __reduce__(self) -> tuple[type[MismatchError], tuple[Mismatch]]:
        return type(self), (self.mismatch,)  # as above


class FusedOpsWarning(UserWarning):
    """Base of every warning that fusedops gives."""


class FallbackWarning(FusedOpsWarning):
    """A call was served by another backend than the preferred one. Given once per (op, backend, reason)."""

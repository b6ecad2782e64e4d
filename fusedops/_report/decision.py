"""The result of applying a policy and the constraints to one call, as text and as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fusedops._report.direction import Direction
from fusedops._report.foreign_text import message
from fusedops._report.reason import NOT_ABOUT_ARGUMENTS, Reason, ReasonCode
from fusedops._report.table import html_table

Status = Literal["selected", "eligible", "refused"]


@dataclass(frozen=True)
class AppliedAdaptation:
    """An adaptation that a call needs.

    Attributes:
        name: the adaptation's name.
        direction: the direction of the kernel that needs it.
        sentence: what it changes.
        bytes: how many bytes it writes beside the result; 0 where it is free.
    """

    name: str
    direction: Direction
    sentence: str
    bytes: int

    def __str__(self) -> str:
        name = self.name if self.direction == "forward" else f"{self.name} (backward)"
        return f"{name}: {self.sentence}: {f'{self.bytes:,} bytes' if self.bytes else 'free'}"


@dataclass(frozen=True)
class Candidate:
    """One backend of a decision. ``reasons`` is empty unless the backend refused the call.

    ``named`` is True where the preferences in effect name the backend, ``optional`` where it is declared optional and
    they do not.
    """

    backend: str
    status: Status
    reasons: tuple[Reason, ...] = ()
    deviations: tuple[str, ...] = ()
    adaptations: tuple[AppliedAdaptation, ...] = ()
    named: bool = False
    optional: bool = False

    @property
    def notes(self) -> list[str]:
        """The reasons, fixes, deviations and adaptations, a line each."""
        return [
            *(reason.detail for reason in self.reasons),
            *(f"to fix: {reason.fix}" for reason in self.reasons if _is_decisive(reason)),
            *(f"deviation: {deviation}" for deviation in self.deviations),
            *(f"adapts: {adaptation}" for adaptation in self.adaptations),
        ]

    @property
    def is_other(self) -> bool:
        """True for a backend that no preference names and that takes no such call, whatever its arguments."""
        return not self.named and any(
            reason.code in _OTHERS and (self.optional or reason.code is not ReasonCode.UNAVAILABLE)
            for reason in self.reasons
        )


_OTHERS = {
    ReasonCode.DEVICE: "for other devices",
    ReasonCode.NO_KERNEL: "without a kernel for it",
    ReasonCode.UNAVAILABLE: "unavailable",
}


@dataclass(frozen=True)
class Preference:
    """An order of backends that applies to the op: where it was set, its text, and whether it is the one in effect."""

    channel: str
    text: str
    in_effect: bool


@dataclass(frozen=True)
class Decision:
    """The backend selected for a call, the refusals with their reasons, and the preferences. ``str()`` is a table.

    Attributes:
        op: the op's name.
        given: the call's arguments as text.
        backend: the selected backend, or None.
        backward: the backend that serves the gradient, or None.
        candidates: every backend, in the order in which they are tried. The text lists on one line, at the
            end, backends for other devices, without a kernel for the op, or optional and unavailable.
        preferences: the channels that set an order for this op, the innermost first.
        fallback: the fallback level.
        assumed: what was assumed where the device is not on this machine; empty otherwise.
        adapt: the adapt setting.
        rows: the rows setting.
        has_gradient: False for an op without gradients.

    >>> import fusedops
    >>> decision = fusedops.explain("bias_gelu", fusedops.TensorSpec((2, 4)), backend="eager")
    >>> decision.backend, decision.backward
    ('eager', 'eager')
    """

    op: str
    given: str
    backend: str | None
    backward: str | None
    candidates: tuple[Candidate, ...]
    preferences: tuple[Preference, ...]
    fallback: str
    assumed: str = ""
    adapt: str = "none"
    rows: str = "any"
    has_gradient: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as JSON-ready data."""
        return {
            "op": self.op,
            "given": self.given,
            "backend": self.backend,
            "backward": self.backward,
            "fallback": self.fallback,
            "adapt": self.adapt,
            "rows": self.rows,
            "assumed": self.assumed,
            "preferences": [asdict(preference) for preference in self.preferences],
            "candidates": [
                {
                    "backend": candidate.backend,
                    "status": candidate.status,
                    "named": candidate.named,
                    "reasons": [reason.to_dict() for reason in candidate.reasons],
                    "deviations": list(candidate.deviations),
                    "adaptations": [asdict(adaptation) for adaptation in candidate.adaptations],
                }
                for candidate in self.candidates
            ],
        }

    def __str__(self) -> str:
        lines = [self._headline(), f"  given     {self.given}"]
        for preference in self.preferences:
            suffix = "" if preference.in_effect else " (overridden)"
            lines.append(f'  prefer    {preference.channel}: "{preference.text}"{suffix}')
        if not self.preferences:
            lines.append("  prefer    nothing set: default order, by priority")
        lines.append(f"  fallback  {self.fallback}")
        if self.adapt != "none":
            lines.append(f"  adapt     {self.adapt}")
        if self.rows != "any":
            lines.append(f"  rows      {self.rows}")
        if self.assumed:
            lines.append(f"  assumed   {self.assumed}")
        width = _width_of_names(self.shown)
        for candidate in self.shown:
            first, *notes = candidate.notes or [""]
            lines.append(f"  {candidate.status:9} {candidate.backend:{width}} {first}".rstrip())
            lines += [f"{'':{13 + width}}{note}" for note in notes]
        if self.others:
            lines.append(f"  others    {self.others}")
        return message("\n".join(lines))

    @property
    def shown(self) -> tuple[Candidate, ...]:
        """The candidates that the text shows on separate lines: all but :attr:`others`."""
        return tuple(candidate for candidate in self.candidates if not candidate.is_other)

    @property
    def others(self) -> str:
        """The backends that the text shows on one line, as that line; empty without any."""
        parts: list[str] = []
        for code, label in _OTHERS.items():
            others = [c.backend for c in self.candidates if c.is_other and c.reasons[0].code is code]
            if others:
                parts.append(f"{label}: {', '.join(others)}")
        return "; ".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(c.status, c.backend, "; ".join(c.notes)) for c in self.shown]
        rows += [("others", "", self.others)] if self.others else []
        return html_table(self._headline(), ("status", "backend", "notes"), rows)

    def _headline(self) -> str:
        return f"{self.op}: {self.served}"

    @property
    def served(self) -> str:
        """The backends that serve the call and its gradient, as text."""
        backward = f"backward: {self.backward or 'no backend'}" if self.has_gradient else "no gradient"
        return f"served by {self.backend or 'no backend'} ({backward})"

    def refusal_text(self) -> str:
        """Return NoBackendError's message: the call, the reasons about its arguments first, then the nearest fix."""
        applied = next((preference for preference in self.preferences if preference.in_effect), None)
        policy = f'policy "{applied.text}" from {applied.channel}' if applied else "default order"
        rows = f', rows="{self.rows}"' if self.rows != "any" else ""
        lines = [f'no backend takes this call of {self.op} (fallback="{self.fallback}", {policy}{rows})']
        lines.append(f"  given     {self.given}")
        # refusals about the arguments come first; the others share one line (xformers#1263 asked for that)
        decisive = [c for c in self.candidates if any(_is_decisive(reason) for reason in c.reasons)]
        width = _width_of_names(decisive)
        for candidate in decisive:
            for position, reason in enumerate(candidate.reasons):
                head = "refused" if candidate is decisive[0] and position == 0 else ""
                name = candidate.backend if position == 0 else ""
                lines.append(f"  {head:9} {name:{width}} {reason.detail}")
        others = [c for c in self.candidates if c.reasons and c not in decisive]
        if others:
            lines.append(f"  ({'; '.join(f'{c.backend}: {c.reasons[0].detail}' for c in others)})")
        withheld = [c.backend for c in self.candidates if not c.reasons]
        if withheld:
            lines.append(f'  (fallback="{self.fallback}" does not allow {", ".join(withheld)})')
        if decisive:
            fixes = dict.fromkeys(reason.fix for reason in decisive[0].reasons)
            lines.append(f"  to fix    {decisive[0].backend}: {'; '.join(fixes)}")
        elif others:
            on_device = [c for c in others if c.reasons[0].code is not ReasonCode.DEVICE]
            nearest = (others if applied else on_device or others)[0]  # the named backend, else one for this device
            lines.append(f"  to fix    {nearest.backend}: {nearest.reasons[0].fix}")
        return "\n".join(lines)


def _width_of_names(candidates: Sequence[Candidate]) -> int:
    return max([8, *(len(candidate.backend) for candidate in candidates)])


def _is_decisive(reason: Reason) -> bool:
    return reason.code not in NOT_ABOUT_ARGUMENTS

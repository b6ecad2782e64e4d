"""What a policy and the limits give for one call, in words and as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fusedops._plan import Plan, make_plan
from fusedops.constraints import Reason, ReasonCode

Status = Literal["chosen", "eligible", "refused"]


@dataclass(frozen=True)
class Verdict:
    """One candidate of a decision. ``reasons`` is empty unless it was refused."""

    backend: str
    status: Status
    reasons: tuple[Reason, ...] = ()
    deviations: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wish:
    """One channel that spoke of this op, its text, and whether it decided the order."""

    channel: str
    text: str
    counted: bool


@dataclass(frozen=True)
class Decision:
    """Who serves a call, who refused it and why, and where each wish came from. ``str()`` is a table for a person.

    Attributes:
        op: the op's name.
        given: the call in words.
        backend: who serves it, or None.
        backward: who serves its gradient, or None.
        candidates: every backend, in the order in which they were asked.
        wishes: the channels that spoke, the innermost first.
        fallback: the fallback level.
        assumed: what was taken for granted where the device is not on this machine; empty otherwise.
    """

    op: str
    given: str
    backend: str | None
    backward: str | None
    candidates: tuple[Verdict, ...]
    wishes: tuple[Wish, ...]
    fallback: str
    assumed: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The decision as JSON-ready data."""
        return {
            "op": self.op,
            "given": self.given,
            "backend": self.backend,
            "backward": self.backward,
            "fallback": self.fallback,
            "assumed": self.assumed,
            "wishes": [{"channel": w.channel, "text": w.text, "counted": w.counted} for w in self.wishes],
            "candidates": [
                {
                    "backend": v.backend,
                    "status": v.status,
                    "reasons": [reason.to_dict() for reason in v.reasons],
                    "deviations": list(v.deviations),
                }
                for v in self.candidates
            ],
        }

    def __str__(self) -> str:
        lines = [f"{self.op}: served by {self.backend or 'nobody'} (backward: {self.backward or 'nobody'})"]
        lines.append(f"  given     {self.given}")
        for wish in self.wishes:
            lines.append(f'  wish      {wish.channel}: "{wish.text}"{"" if wish.counted else " (overruled)"}')
        if not self.wishes:
            lines.append("  wish      none: default order, by priority")
        lines.append(f"  fallback  {self.fallback}")
        if self.assumed:
            lines.append(f"  assumed   {self.assumed}")
        for verdict in self.candidates:
            first, *more = [reason.detail for reason in verdict.reasons] or [""]
            lines.append(f"  {verdict.status:9} {verdict.backend:8} {first}".rstrip())
            lines += [f"{'':21}{detail}" for detail in more]
            lines += [f"{'':21}to qualify: {reason.fix}" for reason in verdict.reasons if _decisive(reason)]
            lines += [f"{'':21}deviation: {deviation}" for deviation in verdict.deviations]
        return "\n".join(lines)

    def refusal_text(self) -> str:
        """NoBackendError's message: the call, the decisive reasons first, the rest in one line, the nearest fix."""
        deciding = next((wish for wish in self.wishes if wish.counted), None)
        policy = f'policy "{deciding.text}" from {deciding.channel}' if deciding else "default order"
        lines = [f'no backend takes this call of {self.op} (fallback="{self.fallback}", {policy})']
        lines.append(f"  given     {self.given}")
        decisive = [v for v in self.candidates if any(_decisive(reason) for reason in v.reasons)]
        for verdict in decisive:
            for position, reason in enumerate(verdict.reasons):
                head = "refused" if verdict is decisive[0] and position == 0 else ""
                lines.append(f"  {head:9} {verdict.backend if position == 0 else '':8} {reason.detail}")
        # decisive refusals alone keep the reader's eye; the rest is one line (xformers#1263 asked for just that)
        minor = [f"{v.backend}: {v.reasons[0].detail}" for v in self.candidates if v.reasons and v not in decisive]
        if minor:
            lines.append(f"  ({'; '.join(minor)})")
        left = [v.backend for v in self.candidates if not v.reasons]
        if left:
            lines.append(f'  (fallback="{self.fallback}" keeps it from {", ".join(left)})')
        fixes = list(dict.fromkeys(reason.fix for v in decisive[:1] for reason in v.reasons))
        if fixes:
            lines.append(f"  to qualify for {decisive[0].backend}: {'; '.join(fixes)}")
        elif minor:
            refused = [v for v in self.candidates if v.reasons]
            here = [v for v in refused if v.reasons[0].code is not ReasonCode.DEVICE]
            first = (refused if deciding else here or refused)[0]  # who was named, else who is for this device
            lines.append(f"  to qualify for {first.backend}: {first.reasons[0].fix}")
        return "\n".join(lines)


def _decisive(reason: Reason) -> bool:
    return reason.code not in (ReasonCode.DEVICE, ReasonCode.UNAVAILABLE, ReasonCode.NO_KERNEL)


def decide(plan: Plan, args: Sequence[Any], assumed: str = "") -> Decision:
    """The whole decision for a call, by the plan that dispatch uses, with every candidate's reasons spelled out."""
    op, policy = plan.op, plan.policy
    chosen, _ = plan.choose(args)
    names = plan.parameters
    verdicts: list[Verdict] = []
    for candidate in plan.candidates:
        reasons: tuple[Reason, ...] = ()
        deviations: tuple[str, ...] = ()
        if candidate.refusal is not None:
            reasons = (candidate.refusal,)
        elif candidate.entry is not None:
            bound = dict(zip(names, args))
            limits = candidate.entry.kernel.limits
            reasons = tuple(reason for limit in limits for reason in limit.reasons(bound))
            deviations = tuple(f"{d.name}: {d.sentence}" for d in candidate.entry.kernel.deviations)
        is_chosen = chosen is not None and candidate.backend == chosen.backend
        status: Status = "refused" if reasons else "chosen" if is_chosen else "eligible"
        verdicts.append(Verdict(candidate.backend, status, reasons, deviations))
    backward = None
    if plan.direction == "backward":
        backward = chosen.backend if chosen else None
    elif chosen is not None:
        # as backward_plan, but without its warnings: to look is not to run
        after = make_plan(op, policy, plan.device_type, "backward", assume=plan.assume, prefer=chosen.backend)
        entry, _ = after.choose(op.backward_args(args[0], args[0], args, ()))  # x stands in for its output
        backward = entry.backend if entry else None
    deciding = policy.deciding(op.name)
    wishes = tuple(
        Wish(layer.channel, layer.text, layer is deciding) for layer in policy.layers if layer.wish(op.name) is not None
    )
    return Decision(
        op.name,
        in_words(names, op.specs(args)),
        chosen.backend if chosen else None,
        backward,
        tuple(verdicts),
        wishes,
        policy.fallback,
        assumed,
    )


def in_words(names: Sequence[str], args: Sequence[Any]) -> str:
    """A call's arguments in words, its tensors given as specs."""
    return ", ".join(f"{name} {_word(arg)}" for name, arg in zip(names, args))


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

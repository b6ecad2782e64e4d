"""What a policy and the limits give for one call, in words and as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fusedops._adapt import offered
from fusedops._constraint import Reason, ReasonCode
from fusedops._entry import Entry
from fusedops._op import Direction
from fusedops._plan import Candidate, Plan, make_plan

Status = Literal["chosen", "eligible", "refused"]


@dataclass(frozen=True)
class Adapted:
    """An adaptation that a call needs: what is done, and the bytes that it writes beside the result (0: free)."""

    name: str
    direction: Direction
    sentence: str
    bytes: int


@dataclass(frozen=True)
class Verdict:
    """One candidate of a decision. ``reasons`` is empty unless it was refused."""

    backend: str
    status: Status
    reasons: tuple[Reason, ...] = ()
    deviations: tuple[str, ...] = ()
    adaptations: tuple[Adapted, ...] = ()


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
        adapt: the adapt setting.
    """

    op: str
    given: str
    backend: str | None
    backward: str | None
    candidates: tuple[Verdict, ...]
    wishes: tuple[Wish, ...]
    fallback: str
    assumed: str = ""
    adapt: str = "none"

    def to_dict(self) -> dict[str, Any]:
        """The decision as JSON-ready data."""
        return {
            "op": self.op,
            "given": self.given,
            "backend": self.backend,
            "backward": self.backward,
            "fallback": self.fallback,
            "adapt": self.adapt,
            "assumed": self.assumed,
            "wishes": [{"channel": w.channel, "text": w.text, "counted": w.counted} for w in self.wishes],
            "candidates": [
                {
                    "backend": v.backend,
                    "status": v.status,
                    "reasons": [reason.to_dict() for reason in v.reasons],
                    "deviations": list(v.deviations),
                    "adaptations": [asdict(adapted) for adapted in v.adaptations],
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
        if self.adapt != "none":
            lines.append(f"  adapt     {self.adapt}")
        if self.assumed:
            lines.append(f"  assumed   {self.assumed}")
        for verdict in self.candidates:
            first, *more = [reason.detail for reason in verdict.reasons] or [""]
            lines.append(f"  {verdict.status:9} {verdict.backend:8} {first}".rstrip())
            lines += [f"{'':21}{detail}" for detail in more]
            lines += [f"{'':21}to qualify: {reason.fix}" for reason in verdict.reasons if _decisive(reason)]
            lines += [f"{'':21}deviation: {deviation}" for deviation in verdict.deviations]
            lines += [f"{'':21}adapts: {_adapted(adapted)}" for adapted in verdict.adaptations]
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


def _adapted(adapted: Adapted) -> str:
    where = f"{adapted.name} (backward)" if adapted.direction == "backward" else adapted.name
    return f"{where}: {adapted.sentence}: {f'{adapted.bytes:,} bytes' if adapted.bytes else 'free'}"


def _taking(candidate: Candidate, args: Sequence[Any]) -> Entry | None:
    """Which entry of a candidate takes the call, as ``Plan.choose`` finds it."""
    for entry in (candidate.entry, candidate.padded):
        if entry is not None and (entry.check is None or entry.check(*args) is None):
            return entry
    return None


def _adaptations(entry: Entry, args: Sequence[Any]) -> tuple[Adapted, ...]:
    """The adaptations of an entry that the call needs."""
    costs = [(item, item.cost(*args)) for item in entry.kernel.adaptations]
    return tuple(
        Adapted(item.name, entry.kernel.direction, item.sentence, cost) for item, cost in costs if cost is not None
    )


def decide(plan: Plan, args: Sequence[Any], assumed: str = "") -> Decision:
    """The whole decision for a call, by the plan that dispatch uses, with every candidate's reasons spelled out."""
    op, policy = plan.op, plan.policy
    chosen, _ = plan.choose(args)
    names = plan.parameters
    backward = chosen.backend if plan.direction == "backward" and chosen else None
    after: dict[str, tuple[Adapted, ...]] = {}
    if plan.direction == "forward" and chosen is not None:
        # as backward_plan, but without its warnings: to look is not to run
        then = make_plan(op, policy, plan.device_type, "backward", assume=plan.assume, prefer=chosen.backend)
        stand_in = op.backward_args(args[0], args[0], args, ())  # x stands in for its output
        entry, _ = then.choose(stand_in)
        if entry is not None:
            backward = entry.backend
            after[backward] = _adaptations(entry, stand_in)
    verdicts: list[Verdict] = []
    for candidate in plan.candidates:
        reasons: tuple[Reason, ...] = ()
        deviations: tuple[str, ...] = ()
        adaptations: tuple[Adapted, ...] = ()
        if candidate.refusal is not None:
            reasons = (candidate.refusal,)
        elif candidate.entry is not None:
            kernel, taking = candidate.entry.kernel, _taking(candidate, args)
            if taking is None:
                bound = dict(zip(names, args))
                reasons = tuple(reason for limit in kernel.limits for reason in limit.reasons(bound))
                reasons = offered(op, kernel, args, reasons)
            else:
                adaptations = _adaptations(taking, args)
            deviations = tuple(f"{d.name}: {d.sentence}" for d in kernel.deviations)
        is_chosen = chosen is not None and candidate.backend == chosen.backend
        status: Status = "refused" if reasons else "chosen" if is_chosen else "eligible"
        adaptations += after.get(candidate.backend, ())
        verdicts.append(Verdict(candidate.backend, status, reasons, deviations, adaptations))
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
        policy.adapt,
    )


def in_words(names: Sequence[str], args: Sequence[Any]) -> str:
    """A call's arguments in words, its tensors given as specs."""
    return ", ".join(f"{name} {_word(arg)}" for name, arg in zip(names, args))


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

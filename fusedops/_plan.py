"""The order in which backends are asked, for one policy, op and device type. Dispatch and `explain` both use it."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fusedops import _in_force
from fusedops._constraint import Constraint, Reason, ReasonCode
from fusedops._entry import Entry
from fusedops._op import Direction, Op
from fusedops._policy import AUTO, Policy
from fusedops._registry import Record, registry
from fusedops._stats import Event, Refusal, counted, forget_uses, tell
from fusedops.errors import FallbackWarning, NoBackendError

# frames of these are not the user's: fusedops itself, and torch's dispatcher on the way through torch.ops
_INSIDE = (os.path.join(os.path.dirname(__file__), ""), os.path.join(os.path.dirname(torch.__file__), ""))
_warned: dict[tuple[str, str, str], object] = {}
_told: dict[tuple[str, str, str], object] = {}


@dataclass(frozen=True)
class Candidate:
    """A backend in its place in the order, before any argument but the device type was looked at."""

    backend: str
    named: bool
    entry: Entry | None
    refusal: Reason | None  # why it serves nothing here, whatever the arguments
    padded: Entry | None = None  # for calls that entry takes once they are padded, where the policy allows that


@dataclass(eq=False)
class Plan:
    """The order for one (policy, op, device type, direction). Made once; the hot path reads ``first``.

    ``first`` and ``after`` hold entries that are counted: the first, and those that follow, by what refused before.
    """

    op: Op
    direction: Direction
    device_type: str
    policy: Policy
    assume: bool
    candidates: tuple[Candidate, ...]
    entries: tuple[Entry, ...] = ()
    first: Entry | None = None
    after: dict[tuple[Entry | Constraint, ...], Entry] = field(default_factory=lambda: {})
    backward: dict[str, Plan] = field(default_factory=lambda: {})

    def choose(self, args: Sequence[Any]) -> tuple[Entry | None, list[tuple[Entry, Constraint]]]:
        """The first entry that takes the call, and one of each backend before it with the limit that refused."""
        refused: dict[str, tuple[Entry, Constraint]] = {}
        for entry in self.entries:
            limit = entry.check(*args) if entry.check is not None else None
            if limit is None:
                refused.pop(entry.backend, None)  # it serves the call padded
                return entry, list(refused.values())
            refused.setdefault(entry.backend, (entry, limit))
        return None, list(refused.values())

    def pick(self, args: Sequence[Any]) -> Entry:
        """The entry that serves the call, the fallback made seen."""
        first = self.first
        if first is None or (first.check is not None and first.check(*args) is not None):
            return self.fall_back(args)
        return first

    def fall_back(self, args: Sequence[Any]) -> Entry:
        """:meth:`choose` for a call that ``first`` refuses: makes the fallback seen, or raises.

        Raises:
            NoBackendError: no allowed backend takes the call.
        """
        entry, refused = self.choose(args)
        if entry is None:
            from fusedops._decision import decide

            raise NoBackendError(decide(self, args))
        key = (entry, *(limit for _, limit in refused))
        found = self.after.get(key)  # one look-up a call, however often it falls back
        if found is None:
            from fusedops._adapt import offered

            bound = dict(zip(self.parameters, args))
            reasons = [
                (refusing.backend, limit, offered(self.op, refusing.kernel, args, limit.reasons(bound)[:1])[0])
                for refusing, limit in refused
            ]
            for refusing, _, reason in reasons:
                self.announce(refusing, reason, entry.backend)
            refusals = [Refusal(refusing, limit.describe(), reason) for refusing, limit, reason in reasons]
            found = self.after[key] = self.counted(entry, refusals)
        return found

    def counted(self, entry: Entry, refusals: Sequence[Refusal] = ()) -> Entry:
        """``entry`` with a count of its calls as those that these refused, besides who serves nothing here at all."""
        absent = [Refusal(c.backend, why.detail, why) for c, why in self.passed_over(entry.backend)]
        return counted(entry, (*absent, *refusals), self.device_type, str(self.policy))

    def first_use(self) -> None:
        """Makes seen what the plan passes over whatever the arguments are: a named backend that cannot run here."""
        if self.first is None:
            return  # every call is an error, which says it all
        for candidate, refusal in self.passed_over(self.first.backend):
            self.announce(candidate.backend, refusal, self.first.backend)

    def passed_over(self, serving: str) -> Iterator[tuple[Candidate, Reason]]:
        """Those before ``serving`` that serve nothing here, where that is news."""
        named_serves = any(c.named and c.backend == serving for c in self.candidates)
        for candidate in self.candidates:
            if candidate.backend == serving:
                return
            # "npu,triton" names a backend for each kind of chip: news only where none of them is for this one
            freely = _passed_over_freely(candidate) and (named_serves or not candidate.named)
            if candidate.refusal is not None and not freely:
                yield candidate, candidate.refusal

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of what ``choose`` gets."""
        return self.op.parameters if self.direction == "forward" else self.op.backward_parameters

    def announce(self, refusing: str, reason: Reason, serving: str) -> None:
        """Tells observers, and warns unless the policy is silent, that ``serving`` runs what ``refusing`` would have.

        Each once; as an error, by the user's filter, the warning was not given, and is raised at each call.
        """
        what = self.op.name if self.direction == "forward" else f"{self.op.name} backward"
        key = (what, refusing, reason.code.value)
        mine = object()  # setdefault is one step under Python's lock: of threads that race, one speaks
        if _told.setdefault(key, mine) is mine:
            refusal = Refusal(refusing, reason.detail, reason)
            policy = str(self.policy)
            tell(Event("fallback", self.op.name, self.direction, serving, self.device_type, policy, (refusal,)))
        if self.policy.fallback == "silent" or _warned.setdefault(key, mine) is not mine:
            return
        try:
            warnings.warn(
                f"{what} runs on {serving}, not on {refusing}: {reason.detail}. To qualify for {refusing}: "
                f'{reason.fix}. (Said once; fallback="raise" makes this an error, "silent" hides it.)',
                FallbackWarning,
                stacklevel=_level_of_user(),
            )
        except FallbackWarning:
            _warned.pop(key, None)
            raise


def _level_of_user() -> int:
    """How many frames up the first one is that is neither fusedops's nor torch's dispatcher."""
    level, at = 1, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while at.f_back is not None and at.f_code.co_filename.startswith(_INSIDE):
        level, at = level + 1, at.f_back
    return level


def make_plan(
    op: Op,
    policy: Policy,
    device_type: str,
    direction: Direction = "forward",
    *,
    assume: bool = False,
    prefer: str | None = None,
) -> Plan:
    """Orders the backends for calls of ``op`` on a device type.

    Args:
        assume: take the backends of that device type for ready without probing, for a device that is not here.
        prefer: for backward, the backend that served forward: it comes first.
    """
    records: dict[str, tuple[Record, bool]] = {}
    for name in policy.order(op.name):
        if name == AUTO:
            break
        record = registry.find(name)
        if record is not None:
            records.setdefault(name, (record, True))
    for record in registry.records():
        records.setdefault(record.name, (record, False))
    candidates = [_candidate(record, named, op, device_type, direction, assume) for record, named in records.values()]
    if policy.adapt == "pad" and op.padding is not None:
        from fusedops._adapt import padded_entry

        candidates = [replace(c, padded=padded_entry(op, c.entry)) if c.entry else c for c in candidates]
    if prefer is not None:
        candidates.sort(key=lambda candidate: candidate.backend != prefer)
    if policy.fallback == "raise":
        serving = _the_one(candidates, prefer)
    else:
        serving = [c for c in candidates if c.refusal is None]
    entries = tuple(entry for c in serving for entry in (c.entry, c.padded) if entry is not None)
    if policy.verifier is not None:
        entries = tuple(map(policy.verifier.watched, entries))
    plan = Plan(op, direction, device_type, policy, assume, tuple(candidates), entries)
    plan.first = plan.counted(entries[0]) if entries else None
    return plan


def _the_one(candidates: list[Candidate], prefer: str | None) -> list[Candidate]:
    """The only backend that fallback="raise" lets serve: the first named one (with none named, the first of all)
    whose business the tensor's device is. For backward, the one that served forward.
    """
    asked = [c for c in candidates if c.backend == prefer] or [c for c in candidates if c.named] or candidates
    for candidate in asked:
        if candidate.refusal is None:
            return [candidate]
        if not _passed_over_freely(candidate):
            return []
    return []


def _passed_over_freely(candidate: Candidate) -> bool:
    """Whether passing over it is no news: another chip's backend, or an op that an unnamed backend does not have."""
    code = candidate.refusal.code if candidate.refusal else None
    return code is ReasonCode.DEVICE or (code is ReasonCode.NO_KERNEL and not candidate.named)


def _candidate(record: Record, named: bool, op: Op, device_type: str, direction: Direction, assume: bool) -> Candidate:
    backend = record.backend
    if backend is None:
        return Candidate(record.name, named, None, record.refusal())
    if not backend.serves(device_type):
        serves = ", ".join(backend.device_types)
        detail = f"serves {serves}, not {device_type}"
        fix = f"move the tensors to {serves}"
        return Candidate(record.name, named, None, Reason(ReasonCode.DEVICE, detail, device_type, serves, fix))
    entry = record.entries.get((op.name, direction))
    if entry is None:
        what = op.name if direction == "forward" else f"{op.name} backward"
        have = ", ".join(dict.fromkeys(item.op for item in backend.kernels)) or "nothing"
        reason = Reason(
            ReasonCode.NO_KERNEL, f"has no kernel for {what}", have, what, f"prefer a backend that has {what}"
        )
        return Candidate(record.name, named, None, reason)
    return Candidate(record.name, named, entry, None if assume else record.refusal())


def backward_plan(plan: Plan, forward: str) -> Plan:
    """The order for the gradient of a call that ``forward`` served: its own backward first, then the plan's order."""
    made = plan.backward.get(forward)
    if made is None:
        made = make_plan(plan.op, plan.policy, plan.device_type, "backward", assume=plan.assume, prefer=forward)
        made.first_use()
        plan.backward[forward] = made
    return made


def forget_warnings() -> None:
    """Lets each fallback, and each first use, be said again. For tests."""
    _warned.clear()
    _told.clear()
    forget_uses()
    _in_force.forget()

"""Plan: which backend serves each call of a model on a device, what refuses it, and what is left to torch."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fusedops._contract.device_spec import DeviceSpec
from fusedops._plan.page import Entry, Section, page, size_text
from fusedops._report.decision import AppliedAdaptation
from fusedops._report.direction import Direction, call_name
from fusedops._report.event import Refusal
from fusedops._report.foreign_text import message
from fusedops._report.reason import Reason, ReasonCode

KINDS = ("products", "attention", "other")
_WIDTH = 100  # columns of the table
_LEAST = 40  # of its last one


class Work(NamedTuple):
    """Calls, the bytes of their tensors (those given and those returned), and their products of two numbers."""

    calls: int = 0
    bytes: int = 0
    products: int = 0


@dataclass(frozen=True)
class PlanRow:
    """Calls of an op that are alike.

    Attributes:
        op: the op.
        direction: forward or backward.
        site: the class of the module that makes them.
        given: their arguments as text.
        backend: the one that serves them; None where none does.
        is_fused: False where that backend serves every device type, by functions of torch.
        calls: how many they are.
        bytes: of the tensors that they take and return.
        refused: the backends before it that refuse them.
        deviations: of the kernel that serves them.
        adaptations: that the kernel needs.
    """

    op: str
    direction: Direction
    site: str
    given: str
    backend: str | None
    is_fused: bool
    calls: int
    bytes: int
    refused: tuple[Refusal, ...] = ()
    deviations: tuple[str, ...] = ()
    adaptations: tuple[AppliedAdaptation, ...] = ()

    @property
    def why(self) -> list[str]:
        """The refusals with their fixes, a line each."""
        return [f"not {each.backend}: {each.reason.detail}; to fix: {each.reason.fix}" for each in self.refused]

    @property
    def differs(self) -> list[str]:
        """The deviations and adaptations of the kernel, a line each."""
        return [*(f"deviation: {each}" for each in self.deviations), *(f"adapts: {each}" for each in self.adaptations)]

    def entry(self) -> Entry:
        """Return the row as the page shows it."""
        backend, reason = self.backend or "none", self.refused[0].reason.code.value if self.refused else ""
        cells = (
            call_name(self.op, self.direction),
            backend,
            f"{self.calls:,}",
            size_text(self.bytes),
            self.site,
            self.given,
        )
        return Entry(cells, (*self.why, *self.differs), self.op, backend, reason)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON-ready data."""
        refused = [_refusal_data(each) for each in self.refused]
        adaptations = [asdict(each) for each in self.adaptations]
        return {**vars(self), "refused": refused, "deviations": [*self.deviations], "adaptations": adaptations}

    @staticmethod
    def of(data: Mapping[str, Any]) -> PlanRow:
        """Return the row of :meth:`to_dict`."""
        refused = tuple(map(_refusal, data["refused"]))
        adaptations = tuple(AppliedAdaptation(**each) for each in data["adaptations"])
        deviations = tuple(data["deviations"])
        fields: dict[str, Any] = {**data, "refused": refused, "deviations": deviations, "adaptations": adaptations}
        return PlanRow(**fields)


def _refusal_data(refusal: Refusal) -> dict[str, Any]:
    fields = refusal.reason.to_dict()
    return {"backend": refusal.backend, "constraint": refusal.constraint, "reason": fields.pop("detail"), **fields}


def _refusal(data: Mapping[str, str]) -> Refusal:
    reason = Reason(ReasonCode(data["code"]), data["given"], data["needed"], data["fix"], data["reason"])
    return Refusal(data["backend"], data["constraint"], reason)


class Plan:
    """The calls of a model on a device that need not exist, made by :func:`fusedops.plan`. ``print`` shows a table.

    Attributes:
        model: the class of the model.
        device: the device.
        run: what was planned: "forward", "training" or "generation".
        rows: the calls of ops, a :class:`PlanRow` for those that are alike.
        torch: what torch computes beside the ops: by kind ("products", "attention", "other") and function.
        assumed: numbers that depend on data, with what was assumed, and the branches that they decide.
        notes: what else holds for the plan.

    >>> import torch, fusedops
    >>> plan = fusedops.plan(torch.nn.Sequential(torch.nn.LayerNorm(64)), torch.zeros(2, 64), device="A2")
    >>> plan
    plan of Sequential on Ascend A2, forward: 1 call of 1 op
      call        calls  backend  because
      layer_norm  1      eager
    fused kernels serve 0 % of all calls, 0 % of the bytes; left to torch: nothing
    """

    def __init__(
        self,
        model: str,
        device: DeviceSpec,
        run: Literal["forward", "training", "generation"],
        rows: Sequence[PlanRow],
        torch: Mapping[tuple[str, str], Work],
        assumed: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self.model, self.device, self.run = model, device, run
        self.rows, self.torch = tuple(rows), dict(torch)
        self.assumed, self.notes = tuple(assumed), tuple(notes)

    @property
    def left(self) -> dict[str, Work]:
        """The calls that torch computes, by kind."""
        sums: dict[str, Work] = {}
        for kind in KINDS:
            works = [work for (of, _), work in self.torch.items() if of == kind]
            sums[kind] = Work(*map(sum, zip(*works))) if works else Work()
        return sums

    @property
    def share(self) -> dict[str, float]:
        """The share of all calls, and of their bytes, that fused kernels serve; torch's own calls count too."""
        left = self.left.values()
        calls = sum(row.calls for row in self.rows) + sum(work.calls for work in left)
        nbytes = sum(row.bytes for row in self.rows) + sum(work.bytes for work in left)
        fused = [row for row in self.rows if row.is_fused]
        return {
            "calls": sum(row.calls for row in fused) / max(calls, 1),
            "bytes": sum(row.bytes for row in fused) / max(nbytes, 1),
        }

    def fallbacks(self, backend: str, ops: Sequence[str] = ()) -> list[PlanRow]:
        """Return the calls that a backend does not serve, of some ops or of all."""
        return [row for row in self.rows if row.backend != backend and (not ops or row.op in ops)]

    @property
    def data(self) -> dict[str, Any]:
        """The plan as JSON-ready data."""
        return {
            "model": self.model,
            "device": asdict(self.device),
            "run": self.run,
            "share": self.share,
            "rows": [row.to_dict() for row in self.rows],
            "torch": {kind: work._asdict() for kind, work in self.left.items()},
            "functions": [{"kind": kind, "name": name, **work._asdict()} for (kind, name), work in self.torch.items()],
            "assumed": [*self.assumed],
            "notes": [*self.notes],
        }

    def to_json(self) -> str:
        """Return :attr:`data` as JSON."""
        return json.dumps(self.data, indent=2)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan of :meth:`to_json`, such as one that another release of transformers made.

        >>> import torch, fusedops
        >>> plan = fusedops.plan(torch.nn.LayerNorm(64), torch.zeros(2, 64), device="A2")
        >>> plan.compare(fusedops.Plan.from_json(plan.to_json())).lines
        ()
        """
        data: dict[str, Any] = json.loads(text)
        device = {**data["device"]}
        for name in ("capability", "packages", "documented"):
            device[name] = None if device[name] is None else tuple(device[name])
        work = {(each.pop("kind"), each.pop("name")): Work(**each) for each in data["functions"]}
        rows = map(PlanRow.of, data["rows"])
        return Plan(data["model"], DeviceSpec(**device), data["run"], [*rows], work, data["assumed"], data["notes"])

    def to_html(self, path: str | Path, *others: Plan) -> None:
        """Write a page that needs no network: the calls with reasons, a filter, the share of each device.

        Args:
            path: of the file.
            *others: plans that the page shows too, as for other devices.
        """
        Path(path).write_text(page([plan._section() for plan in (self, *others)]), encoding="utf-8")

    def _section(self) -> Section:
        fused = sum(row.bytes for row in self.rows if row.is_fused)
        nbytes = fused, sum(row.bytes for row in self.rows) - fused, sum(work.bytes for work in self.left.values())
        entries = [row.entry() for row in self.rows]
        where = f"{self.device}, {self.run}"
        return Section(self.model, where, self.title(), self.share_text(), nbytes, self._texts(), entries)

    def _texts(self) -> tuple[str, ...]:
        return *(f"assumed: {each}" for each in self.assumed), *self.notes

    def compare(self, other: Plan) -> PlanChanges:
        """Return what another plan changes: other releases, dtypes, lengths, devices."""
        return PlanChanges(self, other)

    def title(self) -> str:
        """Return the model, the device and the number of calls, as a line."""
        calls, ops = sum(row.calls for row in self.rows), len({row.op for row in self.rows})
        called = f"{calls:,} call{'s' * (calls != 1)} of {ops} op{'s' * (ops != 1)}"
        return f"plan of {self.model} on {self.device}, {self.run}: {called}"

    def share_text(self) -> str:
        """Return the share that fused kernels serve, as a line."""
        share = {name: f"{100 * value:.0f} %" for name, value in self.share.items()}
        return f"fused kernels serve {share['calls']} of all calls, {share['bytes']} of the bytes"

    def __repr__(self) -> str:
        grouped: Counter[tuple[str, ...]] = Counter()
        for row in self.rows:
            names = dict.fromkeys(each.partition(":")[0] for each in row.deviations)
            notes = [*row.why, *([f"deviations: {', '.join(names)}"] if names else [])]
            key = call_name(row.op, row.direction), row.backend or "none", *notes
            grouped[key] += row.calls
        cells = [(name, f"{calls:,}", backend, notes) for (name, backend, *notes), calls in grouped.items()]
        lines = [self.title()]
        if cells:
            lines += _table(("call", "calls", "backend", ["because"]), cells)
        left = [f"{work.calls:,} {kind} ({size_text(work.bytes)})" for kind, work in self.left.items() if work.calls]
        lines += textwrap.wrap(f"{self.share_text()}; left to torch: {', '.join(left) or 'nothing'}", _WIDTH)
        for text in self._texts():
            lines += textwrap.wrap(text, _WIDTH, subsequent_indent="  ")
        return message("\n".join(lines))


class PlanChanges:
    """The differences of two plans, those of backends and their reasons first. ``print`` shows them.

    Attributes:
        lines: a sentence for each change.
    """

    def __init__(self, before: Plan, after: Plan) -> None:
        self.title = f"{before.model} on {before.device}, {before.run} -> {after.model} on {after.device}, {after.run}"
        served = [_served(plan) for plan in (before, after)]
        backends, counts = list[str](), list[str]()
        for key in dict.fromkeys((*served[0], *served[1])):
            old, new = (each.get(key, Counter()) for each in served)
            if old == new:
                for sign, plans in (("new", (before, after)), ("gone", (after, before))):
                    mine, theirs = (_notes(plan, key) for plan in plans)
                    backends += [f"{key}: {sign}: {note}" for note in theirs if note not in mine]
                continue
            text = f"{key}: {_counts(old)} -> {_counts(new)}"
            if old.keys() == new.keys():
                counts.append(text)
                continue
            rows = [row for row in after.rows if call_name(row.op, row.direction) == key and row.backend not in old]
            why = next((f"; {note}" for row in rows for note in row.why), "")
            backends.append(text + why)
        for name in ("calls", "bytes"):
            old, new = (round(100 * plan.share[name]) for plan in (before, after))
            if old != new:
                counts.append(f"{name} served by fused kernels: {old} % -> {new} %")
        for kind, old in before.left.items():
            if (new := after.left[kind]) != old:
                counts.append(
                    f"left to torch, {kind}: {old.calls:,} calls of {size_text(old.bytes)} -> {new.calls:,} calls of "
                    f"{size_text(new.bytes)}"
                )
        self.lines = (*backends, *counts)

    def __repr__(self) -> str:
        lines = [self.title, *self.lines] if self.lines else [self.title, "nothing changed"]
        return message(
            "\n".join(part for line in lines for part in textwrap.wrap(line, _WIDTH, subsequent_indent="  "))
        )


def _served(plan: Plan) -> dict[str, Counter[str | None]]:
    served: dict[str, Counter[str | None]] = {}
    for row in plan.rows:
        served.setdefault(call_name(row.op, row.direction), Counter())[row.backend] += row.calls
    return served


def _notes(plan: Plan, call: str) -> dict[str, None]:
    """Return the refusals and deviations of calls, without the values of their arguments."""
    rows = [row for row in plan.rows if call_name(row.op, row.direction) == call]
    refused = [f"not {each.backend}: {each.constraint}" for row in rows for each in row.refused]
    return dict.fromkeys([*refused, *(f"deviation: {each}" for row in rows for each in row.deviations)])


def _counts(counts: Counter[str | None]) -> str:
    return " and ".join(f"{backend or 'none'} ({calls})" for backend, calls in counts.items()) or "no call"


def _table(head: tuple[Any, ...], cells: Sequence[tuple[Any, ...]]) -> list[str]:
    """Return lines whose last cell, a list of texts, is wrapped."""
    widths = [max(len(row[column]) for row in (head, *cells)) for column in range(3)]
    under = " " * (2 + sum(width + 2 for width in widths))
    lines: list[str] = []
    for *texts, notes in (head, *cells):
        start = "  " + "".join(f"{text:{width}}  " for text, width in zip(texts, widths))
        parts = [part for note in notes for part in textwrap.wrap(note, max(_LEAST, _WIDTH - len(under)))] or [""]
        lines += [f"{start if at == 0 else under}{part}".rstrip() for at, part in enumerate(parts)]
    return lines

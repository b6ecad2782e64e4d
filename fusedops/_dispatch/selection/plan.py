"""Plan: the backends in the order in which they are tried, for one policy, op, device type and direction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, cast

from torch import Size

from fusedops._contract.backend import Backend
from fusedops._contract.constraint import Constraint, reasons_of
from fusedops._contract.kernel import ops_of
from fusedops._contract.op import Op
from fusedops._dispatch.selection.padding import padded_kernel, with_padding_fix
from fusedops._dispatch.selection.recent import Recent
from fusedops._dispatch.selection.stats import counting
from fusedops._plugins.record import PreparedKernel, Record
from fusedops._plugins.registry import registry
from fusedops._policy.context import ActivePolicy
from fusedops._policy.policy import AUTO, Policy
from fusedops._report.direction import Direction, call_name
from fusedops._report.event import Refusal
from fusedops._report.reason import Reason, ReasonCode

#: See make_plan.
Assumed = bool | frozenset[str]


@dataclass(frozen=True)
class PlannedBackend:
    """A backend at its place in the order, before any argument but the device type is known.

    Attributes:
        backend: its name.
        named: True where the policy names it.
        kernel: its kernel, or None.
        optional: True where its refusals are no fallback: the backend is declared optional, and no policy names it.
        refusal: why it serves no such call, whatever the arguments; None where it may.
        padded: serves calls that ``kernel`` takes once they are padded, where the policy allows that.
    """

    backend: str
    named: bool
    kernel: PreparedKernel | None
    refusal: Reason | None
    padded: PreparedKernel | None = None
    optional: bool = False

    @property
    def silent(self) -> bool:
        """True where passing over it needs no report: it is for another device; or no policy names it, and it is
        optional, has no kernel for the op, or does not promise independent rows.
        """
        code = self.refusal.code if self.refusal else None
        if self.named:
            return code is ReasonCode.DEVICE
        return self.optional or code in (ReasonCode.DEVICE, ReasonCode.NO_KERNEL, ReasonCode.ROWS)


@dataclass(eq=False)
class Plan:
    """The order of backends for one (policy, op, device type, direction). Made once; a call reads ``first``.

    Attributes:
        op: the op.
        direction: forward or backward.
        device_type: of the first argument.
        policy: the preferences.
        assume: True where backends are taken for ready without a probe.
        backends: every backend, in order.
        kernels: those that may serve a call, in order.
        first: the first of ``kernels``, counted; None where there is none.
        fallbacks: counted kernels by what refused before them.
        backward: the plans for the gradient, by the backend that served forward.
        recent: calls that ``first`` took, the newest first.
        shapes: of the tensors of the last calls that ``first`` took and that were not like a recent one.
    """

    op: Op
    direction: Direction
    device_type: str
    active: ActivePolicy
    assume: Assumed
    backends: tuple[PlannedBackend, ...]
    kernels: tuple[PreparedKernel, ...] = ()
    first: PreparedKernel | None = None
    fallbacks: dict[tuple[PreparedKernel | Constraint, ...], PreparedKernel] = field(default_factory=lambda: {})
    backward: dict[str, Plan] = field(default_factory=lambda: {})
    recent: tuple[Recent, ...] = ()
    shapes: tuple[list[Size], ...] = ()

    @property
    def policy(self) -> Policy:
        """The preferences."""
        return self.active.policy

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the arguments."""
        return self.op.parameters_of(self.direction)

    def survey(self, args: Sequence[Any]) -> tuple[PreparedKernel | None, list[tuple[PreparedKernel, Constraint]]]:
        """Return the first kernel that takes the call, and one kernel of each backend before it with what it violates.

        Admission is decided by each kernel's compiled check.
        """
        refused: dict[str, tuple[PreparedKernel, Constraint]] = {}
        for kernel in self.kernels:
            violated = kernel.check(*args)
            if violated is None:
                refused.pop(kernel.backend, None)  # it serves the call padded
                return kernel, list(refused.values())
            refused.setdefault(kernel.backend, (kernel, violated))
        return None, list(refused.values())

    def before(self, serving: str) -> Iterator[PlannedBackend]:
        """Yield the backends before ``serving``."""
        return takewhile(lambda planned: planned.backend != serving, self.backends)

    def passed_over(self, serving: str) -> Iterator[tuple[PlannedBackend, Reason]]:
        """Yield the backends before ``serving`` that serve no such call at all, where that is to be reported."""
        serving_is_named = any(planned.named and planned.backend == serving for planned in self.backends)
        for planned in self.before(serving):
            # "npu,triton" names a backend for each kind of chip: reported only where none of them is for this one
            silent = planned.silent and (serving_is_named or not planned.named)
            if planned.refusal is not None and not silent:
                yield planned, planned.refusal

    def with_count(self, kernel: PreparedKernel, refusals: Sequence[Refusal] = ()) -> PreparedKernel:
        """Return ``kernel`` with a count of its calls, kept by the refusals before it."""
        return counting(kernel, (*self.absent(kernel.backend), *refusals), self.device_type, str(self.policy))

    def absent(self, serving: str) -> list[Refusal]:
        """Return the refusals before ``serving`` of every call, whatever its arguments, that are counted with it."""
        absent = [Refusal(planned.backend, why.detail, why) for planned, why in self.passed_over(serving)]
        absent += [
            Refusal(planned.backend, planned.refusal.detail, planned.refusal)
            for planned in self.before(serving)
            if planned.refusal is not None and planned.refusal.code is ReasonCode.ROWS and planned.silent
        ]
        return absent

    def refusals(self, refused: Sequence[tuple[PreparedKernel, Constraint]], args: Sequence[Any]) -> list[Refusal]:
        """Return what :meth:`survey` found refused, with the reasons."""
        bound = dict(zip(self.parameters, args))
        refusals: list[Refusal] = []
        for kernel, constraint in refused:
            (reason, *_) = with_padding_fix(self.op, kernel.kernel, args, reasons_of(constraint, bound)[:1])
            refusals.append(Refusal(kernel.backend, constraint.describe(), reason))
        return refusals


def make_plan(
    op: Op,
    active: ActivePolicy,
    device_type: str,
    direction: Direction = "forward",
    *,
    assume: Assumed = False,
    prefer: str | None = None,
) -> Plan:
    """Order the backends for calls of an op on a device type.

    Args:
        op: the op.
        active: the policy in effect.
        device_type: of the first argument.
        direction: forward or backward.
        assume: take the backends of that device type for ready without a probe, for a device that is not here; a set
            of packages: the optional ones only where it has a package that they build on.
        prefer: for backward, the backend that served forward: it comes first.
    """
    policy = active.policy
    records: dict[str, tuple[Record, bool]] = {}
    for name in policy.order(op.name):
        if name == AUTO:
            break
        # a name that was valid when the policy was set may have been unregistered since
        records.setdefault(name, (registry.find(name) or Record(name), True))
    for record in registry.records():
        if not record.has_only_ops:
            records.setdefault(record.name, (record, False))
    backends = [_planned(record, named, op, device_type, direction, assume) for record, named in records.values()]
    if policy.rows == "independent":
        backends = [_of_independent_rows(planned, op, device_type, direction) for planned in backends]
    if policy.adapt == "pad" and op.padding is not None:
        backends = [replace(b, padded=padded_kernel(op, b.kernel)) if b.kernel else b for b in backends]
    if prefer is not None:
        backends.sort(key=lambda planned: planned.backend != prefer)
    if policy.fallback == "raise":
        serving = _without_fallback(backends, prefer)
    else:
        serving = [planned for planned in backends if planned.refusal is None]
    kernels = tuple(kernel for b in serving for kernel in (b.kernel, b.padded) if kernel is not None)
    if active.watch is not None:
        kernels = tuple(map(active.watch, kernels))
    plan = Plan(op, direction, device_type, active, assume, tuple(backends), kernels)
    plan.first = plan.with_count(kernels[0]) if kernels else None
    return plan


def _without_fallback(backends: list[PlannedBackend], prefer: str | None) -> list[PlannedBackend]:
    """Return what fallback="raise" allows: the first named backend (with none named, the first of all) that is for the
    tensor's device, and the optional ones before it. For backward, the one that served forward comes first.
    """
    candidates = [b for b in backends if b.backend == prefer] or [b for b in backends if b.named] or backends
    if candidates[0].optional:
        candidates = backends
    serving: list[PlannedBackend] = []
    for planned in candidates:
        if planned.refusal is None:
            serving.append(planned)
        if not (planned.optional if planned.refusal is None else planned.silent):
            break
    return serving


def _planned(
    record: Record, named: bool, op: Op, device_type: str, direction: Direction, assume: Assumed
) -> PlannedBackend:
    kernel = record.kernel(op.name, direction, device_type)  # first: the backend may fail by it
    backend = record.backend
    if backend is None:
        return PlannedBackend(record.name, named, None, record.refusal() or _not_registered(record.name))
    optional = backend.optional and not named
    if not backend.serves(device_type):
        serves = ", ".join(backend.device_types)
        fix = f"move the tensors to {serves}"
        reason = Reason(ReasonCode.DEVICE, device_type, serves, fix, f"serves {serves}, not {device_type}")
        return PlannedBackend(record.name, named, None, reason)
    if kernel is None:
        what = call_name(op.name, direction)
        have = ", ".join(ops_of(backend.kernels)) or "no op"
        others = [r.name for r in registry.records() if r.kernel(op.name, direction, device_type)]
        fix = f"prefer {' or '.join(others)}" if others else f"register a backend with a kernel for {what}"
        reason = Reason(
            ReasonCode.NO_KERNEL, f"kernels for {have}", f"one for {what}", fix, f"has no kernel for {what}"
        )
        return PlannedBackend(record.name, named, None, reason, optional=optional)
    refusal = record.refusal() if assume is False else _not_assumed(backend, assume)
    return PlannedBackend(record.name, named, kernel, refusal, optional=optional)


def _not_assumed(backend: Backend, assume: Assumed) -> Reason | None:
    """Return why a backend is not taken for ready on a device that is not here, or None."""
    packages = backend.packages
    if assume is True or not backend.optional or not packages or {*packages} & {"torch", *cast("Any", assume)}:
        return None
    names = " or ".join(packages)
    detail = f"unavailable: the device is assumed to have no {names}"
    return Reason(ReasonCode.UNAVAILABLE, f"no {names}", backend.needs, f"add {packages[0]} to its packages", detail)


def _of_independent_rows(planned: PlannedBackend, op: Op, device_type: str, direction: Direction) -> PlannedBackend:
    """Return the backend with its kernel for any sizes, or refused where a row's results may depend on other rows."""
    if planned.kernel is None or planned.refusal is not None:
        return planned
    why = planned.kernel.kernel.why_rows_depend(device_type)
    if why is None:
        return replace(planned, kernel=planned.kernel.for_independent_rows())
    others = [
        record.name
        for record in registry.records()
        if (kernel := record.kernel(op.name, direction, device_type))
        and kernel.kernel.why_rows_depend(device_type) is None
    ]
    fix = f"prefer {' or '.join(others)}" if others else 'allow this op with rows="any"'
    detail = f"its results depend on the number of rows: {why}"
    needed = "a kernel whose results do not depend on other rows"
    return replace(planned, refusal=Reason(ReasonCode.ROWS, why, needed, fix, detail))


def _not_registered(name: str) -> Reason:
    return Reason(
        ReasonCode.NOT_REGISTERED,
        f"no backend {name!r}",
        "a registered backend",
        f"register {name!r}, or prefer another",
    )

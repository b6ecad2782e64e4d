"""The decision of a call in full: every candidate's reasons, for explain and for NoBackendError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusedops._contract.constraint import reasons_of
from fusedops._dispatch.selection.padding import with_padding_fix
from fusedops._dispatch.selection.plan import Plan, PlannedBackend, make_plan
from fusedops._plugins.record import PreparedKernel
from fusedops._report.decision import AppliedAdaptation, Candidate, Decision, Preference, Status
from fusedops._report.reason import Reason


def decide(plan: Plan, args: Sequence[Any], assumed: str = "") -> Decision:
    """Return the decision for a call, from the plan that dispatch uses."""
    op, policy = plan.op, plan.policy
    selected, _ = plan.survey(args)
    backward = selected.backend if plan.direction == "backward" and selected else None
    after: dict[str, tuple[AppliedAdaptation, ...]] = {}
    if plan.direction == "forward" and selected is not None and op.has_gradient:
        # not serve.backward_plan, which reports fallbacks: to inspect is not to run
        then = make_plan(op, plan.active, plan.device_type, "backward", assume=plan.assume, prefer=selected.backend)
        placeholders = op.placeholder_backward_args(args)
        kernel, _ = then.survey(placeholders)
        if kernel is not None:
            backward = kernel.backend
            after[backward] = adaptations_of(kernel, placeholders)
    candidates: list[Candidate] = []
    for planned in plan.backends:
        reasons, deviations, adaptations = _about(plan, planned, args)
        is_selected = selected is not None and planned.backend == selected.backend
        status: Status = "refused" if reasons else "selected" if is_selected else "eligible"
        adaptations += after.get(planned.backend, ())
        about = reasons, deviations, adaptations, planned.named, planned.optional
        candidates.append(Candidate(planned.backend, status, *about))
    applied = policy.source_for(op.name)
    preferences = tuple(
        Preference(source.channel, source.text, source is applied)
        for source in policy.sources
        if source.order_for(op.name) is not None
    )
    return Decision(
        op.name,
        call_text(plan.parameters, op.specs(args)),
        selected.backend if selected else None,
        backward,
        tuple(candidates),
        preferences,
        policy.fallback,
        assumed,
        policy.adapt,
        policy.rows,
        op.has_gradient,
    )


def _about(
    plan: Plan, planned: PlannedBackend, args: Sequence[Any]
) -> tuple[tuple[Reason, ...], tuple[str, ...], tuple[AppliedAdaptation, ...]]:
    """Return one backend's reasons to refuse the call, its deviations, and the adaptations that the call needs."""
    if planned.refusal is not None:
        return (planned.refusal,), (), ()
    if planned.kernel is None:
        return (), (), ()
    deviations = tuple(f"{d.name}: {d.sentence}" for d in planned.kernel.kernel.deviations)
    for kernel in (planned.kernel, planned.padded):
        if kernel is not None and kernel.check(*args) is None:
            return (), deviations, adaptations_of(kernel, args)
    bound = dict(zip(plan.parameters, args))
    constraints = planned.kernel.kernel.constraints
    reasons = [reason for constraint in constraints for reason in constraint.reasons(bound)]
    violated = planned.kernel.check(*args)
    if violated is not None and not reasons:
        reasons = reasons_of(violated, bound)
    return with_padding_fix(plan.op, planned.kernel.kernel, args, reasons), deviations, ()


def adaptations_of(kernel: PreparedKernel, args: Sequence[Any]) -> tuple[AppliedAdaptation, ...]:
    """Return the adaptations that a kernel needs for a call, with what they cost."""
    costs = [(item, item.cost(*args)) for item in kernel.kernel.adaptations]
    return tuple(
        AppliedAdaptation(item.name, kernel.kernel.direction, item.sentence, cost)
        for item, cost in costs
        if cost is not None
    )


def call_text(names: Sequence[str], args: Sequence[Any]) -> str:
    """Return a call's arguments as text, its tensors given as specs."""
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in zip(names, args)
    )

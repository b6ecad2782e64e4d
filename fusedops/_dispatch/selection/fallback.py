"""Fallbacks: the plan of a call and the kernel that serves it where the first refuses it, and what is reported.

A report is an event to observers, and a FallbackWarning unless the policy is silent. Loaded by the first call.
"""

from __future__ import annotations

import warnings
from typing import Any

from fusedops._contract.op import Op
from fusedops._dispatch.selection.plan import Plan, make_plan
from fusedops._dispatch.selection.stats import forget_first_uses, is_first, publish
from fusedops._plugins.record import PreparedKernel
from fusedops._policy.context import ActivePolicy
from fusedops._report.direction import call_name
from fusedops._report.event import Event, Refusal
from fusedops._report.reason import Reason
from fusedops._report.user_frame import user_stack_level
from fusedops.errors import FallbackWarning, NoBackendError

_warned: dict[Any, object] = {}
_published: dict[Any, object] = {}


def new_plan(op: Op, active: ActivePolicy, key: tuple[str, str]) -> Plan:
    """Make the plan for an op on a device type, and keep it with the policy."""
    plan = make_plan(op, active, key[1])
    report_passed_over(plan)  # first: under warnings-as-errors a plan that was kept would raise only once
    active.plans[key] = plan
    return plan


def new_backward_plan(plan: Plan, forward: str) -> Plan:
    """Make the plan for the gradient of a call that ``forward`` served: its own backward first, then the order."""
    backward = make_plan(plan.op, plan.active, plan.device_type, "backward", assume=plan.assume, prefer=forward)
    report_passed_over(backward)
    plan.backward[forward] = backward
    return backward


def fall_back(plan: Plan, args: tuple[Any, ...]) -> PreparedKernel:
    """Return the kernel that serves a call that ``plan.first`` refuses, and report the fallback.

    Raises:
        NoBackendError: no backend that the policy allows takes the call.
    """
    kernel, refused = plan.survey(args)
    if kernel is None:
        from fusedops._dispatch.selection.decide import decide  # not before: the decision's data classes take 5 ms

        raise NoBackendError(decide(plan, args))
    key = (kernel, *(constraint for _, constraint in refused))
    counting = plan.fallbacks.get(key)  # one look-up a call, however often it falls back
    if counting is None:
        refusals = report_refusals(plan, kernel, refused, args)
        counting = plan.fallbacks[key] = plan.with_count(kernel, refusals)
    return counting


def report_passed_over(plan: Plan) -> None:
    """Report the backends that a plan passes over whatever the arguments are, such as a named one that cannot run."""
    if plan.first is None:
        return  # every call is an error that has all the reasons
    for planned, reason in plan.passed_over(plan.first.backend):
        report(plan, planned.backend, reason, plan.first.backend)


def report_refusals(
    plan: Plan, kernel: PreparedKernel, refused: list[tuple[PreparedKernel, Any]], args: tuple[Any, ...]
) -> list[Refusal]:
    """Report that ``kernel`` serves a call that others refused for its arguments, and return the refusals."""
    optional = {planned.backend for planned in plan.backends if planned.optional}
    refusals = plan.refusals(refused, args)
    for refusal in refusals:
        if refusal.backend not in optional:
            report(plan, refusal.backend, refusal.reason, kernel.backend)
    return refusals


def report(plan: Plan, refusing: str, reason: Reason, serving: str) -> None:
    """Report that ``serving`` runs what ``refusing`` would have run: once for each reason code.

    Where the user's filter makes the warning an error, it is raised at each call.
    """
    what = call_name(plan.op.name, plan.direction)
    key = (what, refusing, reason.code.value)
    policy = plan.policy
    if is_first(_published, key):
        refusal = Refusal(refusing, reason.detail, reason)
        event = Event("fallback", plan.op.name, plan.direction, serving, plan.device_type, str(policy), (refusal,))
        publish(event)
    if policy.fallback == "silent" or not is_first(_warned, key):
        return
    try:
        warnings.warn(
            f'{what} runs on {serving}, not on {refusing}: {reason}. (Reported once; fallback="raise" makes this an '
            f'error, "silent" hides it.)',
            FallbackWarning,
            stacklevel=user_stack_level(),
        )
    except FallbackWarning:
        _warned.pop(key, None)
        raise


def forget_reports() -> None:
    """Report each fallback and each first use again."""
    _warned.clear()
    _published.clear()
    forget_first_uses()

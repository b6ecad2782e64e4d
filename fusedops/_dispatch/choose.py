"""The slow half of selection: making a plan, and the fallback of a call that the first kernel refuses.

Loaded by the first call: ``select.py`` has the fast half.
"""

from __future__ import annotations

from typing import Any

from fusedops._contract.op import Op
from fusedops._dispatch.decide import decide
from fusedops._dispatch.fallback import report_passed_over, report_refusals
from fusedops._dispatch.plan import Plan, make_plan
from fusedops._plugins.record import PreparedKernel
from fusedops._policy.context import ActivePolicy
from fusedops.errors import NoBackendError


def new_plan(op: Op, active: ActivePolicy, key: tuple[str, str]) -> Plan:
    """Make the plan for an op on a device type, and keep it with the policy."""
    plan = make_plan(op, active, key[1])
    report_passed_over(plan)  # before it is kept: where the user makes warnings errors, each call is to raise
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
        raise NoBackendError(decide(plan, args))
    key = (kernel, *(constraint for _, constraint in refused))
    counting = plan.fallbacks.get(key)  # one look-up a call, however often it falls back
    if counting is None:
        refusals = report_refusals(plan, kernel, refused, args)
        counting = plan.fallbacks[key] = plan.with_count(kernel, refusals)
    return counting

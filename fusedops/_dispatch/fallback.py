"""Reports of fallbacks: an event to observers, and a FallbackWarning unless the policy is silent."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch

from fusedops._contract.constraint import reasons_of
from fusedops._dispatch.padding import with_padding_fix
from fusedops._dispatch.plan import Plan
from fusedops._dispatch.stats import forget_first_uses, once, publish
from fusedops._plugins.record import PreparedKernel
from fusedops._report.direction import call_name
from fusedops._report.event import Event, Refusal
from fusedops._report.reason import Reason
from fusedops.errors import FallbackWarning

# frames in these folders are not the user's: fusedops itself, and torch's dispatcher on the way through torch.ops
_INTERNAL = tuple(
    os.path.join(folder, "") for folder in (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__))
)
_warned: dict[Any, object] = {}
_published: dict[Any, object] = {}


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
    bound = dict(zip(plan.parameters, args))
    optional = {planned.backend for planned in plan.backends if planned.optional}
    refusals: list[Refusal] = []
    for refusing, constraint in refused:
        reason = with_padding_fix(plan.op, refusing.kernel, args, reasons_of(constraint, bound)[:1])[0]
        if refusing.backend not in optional:
            report(plan, refusing.backend, reason, kernel.backend)
        refusals.append(Refusal(refusing.backend, constraint.describe(), reason))
    return refusals


def report(plan: Plan, refusing: str, reason: Reason, serving: str) -> None:
    """Report that ``serving`` runs what ``refusing`` would have run: once for each reason code.

    Where the user's filter makes the warning an error, it is raised at each call.
    """
    what = call_name(plan.op.name, plan.direction)
    key = (what, refusing, reason.code.value)
    policy = plan.policy
    if once(_published, key):
        refusal = Refusal(refusing, reason.detail, reason)
        event = Event("fallback", plan.op.name, plan.direction, serving, plan.device_type, str(policy), (refusal,))
        publish(event)
    if policy.fallback == "silent" or not once(_warned, key):
        return
    try:
        warnings.warn(
            f'{what} runs on {serving}, not on {refusing}: {reason}. (Reported once; fallback="raise" makes this an '
            f'error, "silent" hides it.)',
            FallbackWarning,
            stacklevel=_user_stack_level(),
        )
    except FallbackWarning:
        _warned.pop(key, None)
        raise


def _user_stack_level() -> int:
    """Return how many frames up the first one is that belongs neither to fusedops nor to torch's dispatcher."""
    level, frame = 1, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_INTERNAL, "<fusedops")):
        level, frame = level + 1, frame.f_back
    return level


def forget_reports() -> None:
    """Report each fallback and each first use again."""
    _warned.clear()
    _published.clear()
    forget_first_uses()

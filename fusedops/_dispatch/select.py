"""The fast half of selection: which kernel serves a call, by a plan that exists. Every way in uses these functions.

The figures in comments are from a 2-core Zen 3 virtual machine, torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import profiler

from fusedops._policy import context

if TYPE_CHECKING:
    from fusedops._contract.op import Op
    from fusedops._dispatch.plan import Plan
    from fusedops._plugins.record import PreparedKernel


def plan_for(op: Op, x: Tensor, backend: str | None) -> Plan:
    """Return the plan for a call whose first argument is ``x``, by the policy in effect. Made once, then looked up."""
    block = context.frame.get()
    active = (context.process or context.process_policy()) if block is None else block.active()
    if backend is not None:
        active = active.with_argument(backend)
    # the keys for CPU and CUDA are ready: x.device.type costs 0.4 us
    key = op.cpu_key if x.is_cpu else op.cuda_key if x.is_cuda else (op.name, x.device.type)
    plan = active.plans.get(key)
    if plan is None:
        from fusedops._dispatch.choose import new_plan

        plan = new_plan(op, active, key)
    return plan


def backward_plan(plan: Plan, forward: str) -> Plan:
    """Return the plan for the gradient of a call that the backend ``forward`` served."""
    backward = plan.backward.get(forward)
    if backward is None:
        from fusedops._dispatch.choose import new_backward_plan

        backward = new_backward_plan(plan, forward)
    return backward


def select(plan: Plan, args: tuple[Any, ...]) -> PreparedKernel:
    """Return the kernel that serves a call, counted. A fallback is reported.

    Raises:
        NoBackendError: no backend that the policy allows takes the call.
    """
    kernel = plan.first
    if kernel is None or kernel.check(*args) is not None:
        from fusedops._dispatch.choose import fall_back

        kernel = fall_back(plan, args)
    return kernel


def counted_call(kernel: PreparedKernel) -> Any:
    """Count a call of a kernel, and return the function to call: a profiler's range around it, where one is active."""
    next(kernel.count)
    if profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
        return kernel.in_profiler_range().call
    return kernel.call

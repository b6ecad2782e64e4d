"""The admission of every call, plain or registered: the plan, the check, the kernel, its count, the run.

The figures in comments are from a 2-core Zen 3 virtual machine, torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, is_grad_enabled

from fusedops._dispatch import autograd
from fusedops._dispatch.selection.recent import MOST, with_call
from fusedops._policy import context
from fusedops._torch import forward_ad

if TYPE_CHECKING:
    from fusedops._contract.op import Op
    from fusedops._dispatch.selection.plan import Plan
    from fusedops._plugins.record import PreparedKernel
    from fusedops._policy.context import ActivePolicy


def serve_again(op: Op, args: tuple[Any, ...], backend: str | None) -> Any:
    """Serve a call like a recent one of its plan, without a check of its arguments; return None for any other call.

    A recent call was on plain tensors, and the comparison sees traces, modes and transforms, but not forward mode. The
    frames of this function and of :func:`run` take 0.1 us.
    """
    try:
        plan = look_up(op, args[0], backend)[2]
        if plan is None or forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
            return None
        for recent in plan.recent:
            if recent[0](*args):
                break
        else:
            return None
    except (AttributeError, TypeError, ValueError, RuntimeError):  # an invalid argument or policy: reported later
        return None
    _, kernel, wants_gradient, backward = recent
    if op.prepare_args is not None:  # prepared(), without its frame
        args = op.prepare_args(args)
    return run(op, plan, kernel, args, wants_gradient, backward)


def serve(op: Op, args: tuple[Any, ...], backend: str | None) -> Any:
    """Serve a call on plain tensors that the op's check accepts, with autograd where a gradient is wanted.

    Args:
        op: the op.
        args: every argument, in the op's order.
        backend: a policy for this call alone, or None.

    Returns:
        What the public function returns.

    Raises:
        NoBackendError: no backend that the policy allows takes the call.
        PolicyError: ``backend`` is invalid.
    """
    plan = plan_for(op, args[0], backend)
    kernel = select(plan, args)
    prepared = op.prepared(args)  # after the selection: a call that is not served draws no random number
    wants_gradient = wants_gradient_of(op, args)
    backward = None
    if wants_gradient and is_grad_enabled():
        prepared = autograd.unwrapped(prepared)
        backward = _backward_kernel(op, plan, kernel, prepared)
    if kernel is plan.first:
        shapes = [args[index].shape for index in op.gradient_indices if args[index] is not None]
        if shapes in plan.shapes:
            plan.recent = with_call(plan.recent, op.parameters, kernel, backward, args, wants_gradient)
        else:
            plan.shapes = (shapes, *plan.shapes[: MOST - 1])
    return run(op, plan, kernel, prepared, wants_gradient, backward)


def wants_gradient_of(op: Op, args: tuple[Any, ...]) -> bool:
    """Return True where a tensor that the op differentiates requires a gradient."""
    # not any(...): a generator costs 0.4 us
    return True in [args[index].requires_grad for index in op.gradient_indices if args[index] is not None]


def run(
    op: Op,
    plan: Plan,
    kernel: PreparedKernel,
    args: tuple[Any, ...],
    wants_gradient: bool,
    backward: PreparedKernel | None = None,
) -> Any:
    """Call a selected kernel, with autograd if a gradient is wanted: by ``backward``, else by one selected here."""
    if wants_gradient and is_grad_enabled():
        if backward is None:
            args = autograd.unwrapped(args)
            backward = _backward_kernel(op, plan, kernel, args)
        return autograd.apply(op, kernel.counted(), backward, True, args)
    if not op.saved:
        results = kernel.counted()(*args)
        if op.written:
            op.count_writes(args)
        return results
    results = kernel.counted()(*args, False)
    return results[0] if op.single else op.outputs_of(results)


def forward_results(op: Op, args: tuple[Any, ...], backend: str | None, save: bool = False) -> Any:
    """Return what the forward kernel for a valid call returns, saved values included. Without autograd."""
    kernel = select(plan_for(op, args[0], backend), args)
    results = op.call_kernel(kernel.counted(), args, save)
    if op.written:
        op.count_writes(args)
    return results


def backward_results(op: Op, args: tuple[Any, ...], backend: str | None) -> Any:
    """Return what the backward kernel for a valid call returns. Which backend ran forward is not known: the first."""
    plan = plan_for(op, args[0], backend)
    after = backward_plan(plan, plan.first.backend if plan.first else "")
    return select(after, args).run(args)


def plan_for(op: Op, x: Tensor, backend: str | None) -> Plan:
    """Return the plan for a call whose first argument is ``x``, by the policy in effect. Made once, then looked up."""
    active, key, plan = look_up(op, x, backend)
    if plan is None:
        from fusedops._dispatch.selection.fallback import new_plan  # loaded by the first call, not by the import

        plan = new_plan(op, active, key)
    return plan


def look_up(op: Op, x: Tensor, backend: str | None) -> tuple[ActivePolicy, tuple[str, str], Plan | None]:
    """Return the policy in effect, the key of the plan in it, and the plan, or None where none was made yet."""
    block = context.frame.get()
    active = (context.process or context.process_policy()) if block is None else block.active()
    if backend is not None:
        active = active.with_argument(backend)
    # the keys for CPU and CUDA are ready: x.device.type costs 0.4 us
    key = op.cpu_key if x.is_cpu else op.cuda_key if x.is_cuda else (op.name, x.device.type)
    return active, key, active.plans.get(key)


def backward_plan(plan: Plan, forward: str) -> Plan:
    """Return the plan for the gradient of a call that the backend ``forward`` served."""
    backward = plan.backward.get(forward)
    if backward is None:
        from fusedops._dispatch.selection.fallback import new_backward_plan

        backward = new_backward_plan(plan, forward)
    return backward


def select(plan: Plan, args: tuple[Any, ...]) -> PreparedKernel:
    """Return the kernel that serves a call. A fallback is reported.

    Raises:
        NoBackendError: no backend that the policy allows takes the call.
    """
    kernel = plan.first
    if kernel is None or kernel.check(*args) is not None:
        from fusedops._dispatch.selection.fallback import fall_back

        kernel = fall_back(plan, args)
    return kernel


def _backward_kernel(op: Op, plan: Plan, kernel: PreparedKernel, args: tuple[Any, ...]) -> PreparedKernel:
    """Return the kernel of the gradient. It is selected before forward runs, so that a refusal raises in time."""
    after = backward_plan(plan, kernel.backend)
    backward = after.first
    if backward is None or not backward.unconditional:
        backward = select(after, op.placeholder_backward_args(args))
    return backward

"""bind: an op with the selection done once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from fusedops._contract.op import Op
from fusedops._contract.plain_argument import OPTIONAL_TYPES
from fusedops._contract.signature import with_floats
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._dispatch.selection.plan import Plan
from fusedops._dispatch.serve import plan_for, run, select, wants_gradient_of
from fusedops._explain import find_op
from fusedops._plugins.record import PreparedKernel
from fusedops._policy import context
from fusedops._policy.context import ActivePolicy, active_policy
from fusedops._torch import dispatch_modes, is_traced, is_transformed
from fusedops.errors import InvalidInputError


def bind(
    op: str | Callable[..., Any], *like_args: Any, backend: str | None = None, **like_kwargs: Any
) -> Callable[..., Any]:
    """Select the backend for calls like this one now, and return the op without the selection.

    The returned function has the op's signature, without ``backend``, and its gradients. It checks nothing: each call
    must have the shapes, dtypes and device of ``like_args``, the same arguments present, and numbers that the kernel's
    constraints accept; the result of another call is undefined. A policy that changes later has no effect; a block of
    :func:`fusedops.verify` compares the calls in it. Under torch.compile, under transforms and for subclasses of
    tensors, where no kernel can be called directly, it is the op itself.

    Args:
        op: the op's name, or its public function.
        *like_args: the arguments of one such call, its tensors real. Nothing runs, and no random number is drawn.
        backend: as on the op itself.
        **like_kwargs: the same, by name.

    Returns:
        A function of the op's arguments.

    Raises:
        InvalidInputError: the op does not accept these arguments.
        NoBackendError: no backend serves such a call; its ``decision`` has the reasons.
        PolicyError: an unknown op or backend.

    >>> import torch, fusedops
    >>> gelu = fusedops.bind("bias_gelu", torch.zeros(2), backend="eager")
    >>> gelu(torch.zeros(2))
    tensor([0., 0.])
    """
    contract = find_op(op, "bind")
    first = contract.bind(like_args, like_kwargs)[0]
    like = contract.bound_specs(like_args, like_kwargs)  # as specs, so that nothing is drawn
    if isinstance(first, TensorSpec):
        name = contract.parameters[0]
        raise InvalidInputError(
            f"bind: got {name} as a TensorSpec, expected a tensor on this machine; to fix: use explain for specs"
        )
    plan = plan_for(contract, first, backend)
    kernel = select(plan, like)
    public, parameters, defaults = contract.function, contract.parameters, contract.defaults
    count, prepare_args, indices = len(parameters), contract.prepare_args, contract.float_indices

    @wraps(public)
    def bound(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args = contract.bind(args, kwargs)
        elif len(args) < count:
            args += defaults[len(args) :]
        if not _is_plain(contract, args):
            return public(**dict(zip(parameters, args)), backend=backend)
        args = with_floats(args, indices)
        serve = _run_watched if context.watching else run
        wants_gradient = wants_gradient_of(contract, args)
        results = serve(contract, plan, kernel, args if prepare_args is None else prepare_args(args), wants_gradient)
        return contract.absent_outputs_to_none(results, args) if contract.output_of else results

    bound.__signature__ = contract.signature  # type: ignore[attr-defined]
    return bound


def _is_plain(op: Op, args: tuple[Any, ...]) -> bool:
    """Return True where a kernel may be called: nothing traces or transforms, and every tensor is a plain one."""
    if is_traced() or dispatch_modes() or is_transformed():
        return False
    for index in op.tensor_indices:  # not any(...): a generator costs 0.4 us
        arg = args[index]
        if type(arg) not in OPTIONAL_TYPES and not isinstance(arg, int):  # a seed may be a number
            return False
    return True


def _run_watched(op: Op, plan: Plan, kernel: PreparedKernel, args: tuple[Any, ...], wants_gradient: bool) -> Any:
    """Serve a bound call while a block of this thread or another one compares: in the block, by a watched kernel."""
    watch = active_policy().watch
    if watch is None or plan.active.watch is not None:
        return run(op, plan, kernel, args, wants_gradient)
    watched = replace(plan, active=ActivePolicy(plan.policy, watch), fallbacks={}, backward={})
    return run(op, watched, watch(kernel), args, wants_gradient)

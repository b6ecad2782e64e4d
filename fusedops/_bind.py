"""bind: an op with the selection done once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from fusedops._contract.op import Op
from fusedops._contract.signature import with_floats
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._dispatch.call import not_plain, run
from fusedops._dispatch.plan import Plan
from fusedops._dispatch.select import plan_for, select
from fusedops._explain import find_op
from fusedops._plugins.record import PreparedKernel
from fusedops._policy.context import ActivePolicy, active_policy
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
    count, complete, places = len(parameters), contract.complete, contract.float_places

    @wraps(public)
    def bound(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args = contract.bind(args, kwargs)
        elif len(args) < count:
            args += defaults[len(args) :]
        if not_plain(contract, args):
            return public(**dict(zip(parameters, args)), backend=backend)
        args = with_floats(args, places)
        results = _serve(contract, plan, kernel, args if complete is None else complete(args))
        return contract.present(results, args) if contract.output_of else results

    bound.__signature__ = contract.signature  # type: ignore[attr-defined]
    return bound


def _run_watched(op: Op, plan: Plan, kernel: PreparedKernel, args: tuple[Any, ...]) -> Any:
    """Serve a bound call while a block of this thread or another one compares: in the block, by a watched kernel."""
    watch = active_policy().watch
    if watch is None or plan.active.watch is not None:
        return run(op, plan, kernel, args)
    watched = replace(plan, active=ActivePolicy(plan.policy, watch), fallbacks={}, backward={})
    return run(op, watched, watch(kernel), args)


_serve: Callable[[Op, Plan, PreparedKernel, tuple[Any, ...]], Any] = run  # of every bound function
_watching = 0
_lock = threading.Lock()


def enter_watched() -> None:
    """Begin a block that compares results. Bound functions look for one only while there is one."""
    _change(1)


def leave_watched() -> None:
    """End such a block."""
    _change(-1)


def _change(blocks: int) -> None:
    global _serve, _watching
    with _lock:
        _watching += blocks
        _serve = _run_watched if _watching else run

"""The way of a call: from the public function to a kernel.

Three ways, in the order of the checks: under torch.compile and wherever tensors are not plain (fake tensors, subclasses
such as DTensor, dispatch modes) the registered torch op; under functorch transforms and forward-mode differentiation
the op's reference, which torch can transform; else, the hot path, the kernel itself. All choices are by the same plan.

The figures in comments are from a 2-core Zen 3 virtual machine, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import modules
from typing import TYPE_CHECKING, Any

import torch
from torch._C import (
    _len_torch_dispatch_stack as dispatch_modes,  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue,reportUnknownVariableType]
)
from torch._C._functorch import (
    peek_interpreter_stack as functorch_level,  # pyright: ignore[reportPrivateUsage,reportMissingModuleSource,reportUnknownVariableType]
)
from torch.autograd import forward_ad, profiler
from torch.compiler import is_dynamo_compiling

from fusedops import _in_force
from fusedops._gradient import make_gradient
from fusedops._op import without_annotations
from fusedops._policy import check_text
from fusedops.errors import InvalidInputError

if TYPE_CHECKING:
    from fusedops._entry import Entry
    from fusedops._op import Op
    from fusedops._plan import Plan
    from fusedops._policy import Policy

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))

_RUN = """
def run({names}, backend):
    if is_dynamo_compiling():
        return torch_op(op, ({names}), backend)
    if {subclass} or dispatch_modes():
        validate({names})
        return torch_op(op, ({names}), backend)
    validate({names})
    if functorch_level() is not None or forward_ad._current_level >= 0:
        return op.call_reference(({names}))
    plan = plan_for(op, {first}, backend)
    entry = plan.first
    if entry is None or (entry.check is not None and entry.check({names}) is not None):
        entry = plan.fall_back(({names}))
"""
_BOUND = """
def {name}({signature}):
    {completed}
    if is_dynamo_compiling() or {subclass} or dispatch_modes():
        return public({passed}, backend=backend)
    if functorch_level() is not None or forward_ad._current_level >= 0:
        return public({passed}, backend=backend)
    entry = chosen
"""
_CALL = """
    next(entry.count)
    if profiler._is_profiler_enabled:
        entry = entry.ranged()
    if ({gradient}) and is_grad_enabled():
        return with_gradient(plan, entry, {names})
    return entry.call({names})
"""


def make_run(op: Op) -> Callable[..., torch.Tensor]:
    """Builds an op's ``run(*args, backend)``, the hot path, as source with the op's own arguments written out.

    The same in loops over ``args`` costs 0.6 us more. Subclasses (fake tensors, DTensor) and dispatch modes need the
    registered op; functorch's wrappers and forward-mode duals are plain to look at, so those levels are asked instead.
    """
    return _made(op, _RUN + _CALL, "run", {"validate": op.validate, "plan_for": plan_for, "torch_op": torch_op})


def make_bound(op: Op, plan: Plan, entry: Entry, backend: str | None) -> Callable[..., torch.Tensor]:
    """Builds what :func:`fusedops.bind` returns: ``run`` without the checks and the choosing.

    Where a kernel cannot be called (traced, transformed, on subclasses) it is the op with ``backend``.
    """
    from fusedops import ops

    names = ", ".join(op.parameters)
    head = _BOUND.replace("{signature}", without_annotations(op.signature)[1:-1])
    head = head.replace("{passed}", ", ".join(f"{name}={name}" for name in op.parameters))
    # only where there is something to draw or to make: a dropout's seed
    draws = op.complete is not type(op).complete
    head = head.replace("{completed}", f"{names} = complete(({names}))" if draws else "")
    known = {"plan": plan, "chosen": entry, "public": getattr(ops, op.name), "backend": backend}
    return _made(op, head + _CALL, op.name, {**known, "complete": op.complete})


def _made(op: Op, template: str, name: str, more: dict[str, Any]) -> Callable[..., torch.Tensor]:
    passed = (op.passed_through,) if op.passed_through else ()
    source = template.format(
        name=name,
        names=", ".join(op.parameters),
        first=op.parameters[0],
        subclass=" or ".join(f"type({name}) not in plain" for name in op.tensors),
        gradient=" or ".join(f"{name} is not None and {name}.requires_grad" for name in (*op.differentiable, *passed)),
    )
    known: dict[str, Any] = {
        "plain": _PLAIN,
        "dispatch_modes": dispatch_modes,
        "functorch_level": functorch_level,
        "forward_ad": forward_ad,
        "profiler": profiler,
        "is_grad_enabled": torch.is_grad_enabled,
        "is_dynamo_compiling": is_dynamo_compiling,
        "op": op,
        **more,
    }

    def with_gradient(*args: Any) -> torch.Tensor:
        """Until the first call that wants a gradient: at import, building it takes a tenth of the time."""
        known["with_gradient"] = make_gradient(op)
        return known["with_gradient"](*args)

    known["with_gradient"] = with_gradient
    exec(compile(source, f"{__file__} {op.name}", "exec"), known)  # named so that a warning does not point here
    return known[name]


def plan_for(op: Op, x: torch.Tensor, backend: str | None) -> Plan:
    """The plan for a call whose first argument is ``x``, by the policy in force here. Made once, then looked up."""
    here = _in_force.frame.get()
    policy = (_in_force.process or _in_force.process_policy()) if here is None else here.policy()
    if backend is not None:
        policy = _in_force.with_argument(policy, backend)
    # a ready-made key spares CPU and CUDA calls the 0.4 us of x.device.type
    key = op.cpu_key if x.is_cpu else op.cuda_key if x.is_cuda else (op.name, x.device.type)
    plan = policy.plans.get(key)
    return plan if plan is not None else _new_plan(op, policy, key)


def _new_plan(op: Op, policy: Policy, key: tuple[str, str]) -> Plan:
    from fusedops._plan import make_plan

    plan = make_plan(op, policy, key[1])
    plan.first_use()  # before it is kept: where the user made its warning an error, each call is to be one
    policy.plans[key] = plan
    return plan


def serve(entry: Entry, args: Sequence[Any]) -> Any:
    """Calls what was chosen, counted and seen by the profiler, as the hot path does."""
    next(entry.count)
    if profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
        entry = entry.ranged()
    return entry.call(*args)


def run_forward(op: Op, args: tuple[Any, ...], backend: str | None) -> torch.Tensor:
    """Forward inside the registered torch op: the choice is made here, at run time, so a changed policy is seen."""
    op.validate(*args)
    return serve(plan_for(op, args[0], backend).pick(args), args)


def run_backward(op: Op, args: tuple[Any, ...], backend: str | None) -> Any:
    """Backward inside the registered torch op. Which forward ran is not known here: the first in the order serves."""
    from fusedops._plan import backward_plan

    plan = plan_for(op, args[0], backend)
    preferred = plan.first.backend if plan.first else ""
    return serve(backward_plan(plan, preferred).pick(args), args)


def know_dtensor() -> None:
    """Gives the registered ops their rules for DTensor, once there can be one."""
    if "torch.distributed.tensor" in modules and "fusedops._sharding" not in modules:
        import fusedops._sharding  # registers them  # noqa: F401 # pyright: ignore[reportUnusedImport]


# called while tracing, never traced: the mark of torch.compiler.assume_constant_result, which would load dynamo
know_dtensor._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def torch_op(op: Op, args: Sequence[Any], backend: str | None) -> Any:
    """Calls ``torch.ops.fusedops.<op>``."""
    know_dtensor()
    for name, value in zip(op.parameters, args):  # torch's own words for these would be its schema's
        if name in op.tensors and not (value is None or isinstance(value, torch.Tensor)):
            raise _no_tensor(op, name, value)
    if backend is not None:
        check_text(backend, "backend=")
    function = getattr(torch.ops.fusedops, op.name).default
    return function(*args, backend=backend)


def _no_tensor(op: Op, name: str, value: object) -> InvalidInputError:
    return InvalidInputError(
        f"{op.name}: {name} is a {type(value).__name__}; needs a torch.Tensor; a TensorSpec is for fusedops.explain"
    )

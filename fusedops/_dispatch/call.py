"""The path of a call, from the public function to a kernel.

Three branches: under torch.compile, torch.jit.trace and wherever tensors are not plain (fake tensors, subclasses such
as DTensor, dispatch modes) the registered torch op; under functorch transforms and forward-mode differentiation the
op's reference, which torch can transform; else a kernel. The kernel is selected by the same plan in all of them.
torch.fx.symbolic_trace records the public function itself.

The figures in comments are from a 2-core Zen 3 virtual machine, torch 2.13.
"""

from __future__ import annotations

from sys import modules
from typing import TYPE_CHECKING, Any

from torch import is_grad_enabled
from torch._C import (
    _is_tracing as jit_tracing,  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue,reportUnknownVariableType]
)
from torch._C import (
    _len_torch_dispatch_stack as dispatch_modes,  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue,reportUnknownVariableType]
)
from torch._C._functorch import (
    peek_interpreter_stack as functorch_level,  # pyright: ignore[reportPrivateUsage,reportMissingModuleSource,reportUnknownVariableType]
)
from torch.autograd import forward_ad, profiler
from torch.compiler import is_dynamo_compiling

from fusedops._contract.plain_argument import OPTIONAL_TYPES, PlainFloat, PlainTensor
from fusedops._contract.signature import with_floats
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._dispatch.autograd import with_gradient
from fusedops._dispatch.select import counted_call, plan_for, select
from fusedops._dispatch.torch_library import call_registered
from fusedops.errors import InvalidInputError

if TYPE_CHECKING:
    from fusedops._contract.constraint import Constraint
    from fusedops._contract.op import Op
    from fusedops._dispatch.plan import Plan
    from fusedops._plugins.record import PreparedKernel


def call(op: Op, args: tuple[Any, ...], backend: str | None) -> Any:
    """Serve a call of an op.

    Args:
        op: the op.
        args: every argument, in the op's order.
        backend: a policy for this call alone, or None.

    Returns:
        The output, or a tuple where the op has several.

    Raises:
        InvalidInputError: an argument violates a constraint of the op.
        NoBackendError: no backend that the policy allows takes the call.
        PolicyError: ``backend`` is invalid.

    >>> import torch, fusedops
    >>> fusedops.call(fusedops.ops.OPS["bias_gelu"], (torch.zeros(2), None, "tanh"), None)
    tensor([0., 0.])
    """
    if is_dynamo_compiling() or jit_tracing():  # pyright: ignore[reportUnknownVariableType]
        return call_registered(op, args, backend)
    try:
        violated = op.check(*args)
    except (AttributeError, TypeError, RuntimeError):  # a value of another type; a nested tensor has no shape
        return _invalid(op, args, backend)
    if violated is not None or dispatch_modes():
        return _not_plain(op, args, backend, violated)
    if functorch_level() is not None or forward_ad._current_level >= 0:  # pyright: ignore
        return op.reference(*op.completed(args))
    plan = plan_for(op, args[0], backend)
    kernel = plan.first
    if kernel is None or kernel.check(*args) is not None:  # what select() asks first: its call costs 0.05 us
        kernel = select(plan, args)
    if op.complete is not None:
        args = op.complete(args)  # after the selection: a call that is not served draws no random number
    return run(op, plan, kernel, args)


def run(op: Op, plan: Plan, kernel: PreparedKernel, args: tuple[Any, ...]) -> Any:
    """Call a selected kernel, with autograd where a gradient is wanted."""
    if is_grad_enabled():
        for place in op.gradient_places:
            tensor = args[place]
            if tensor is not None and tensor.requires_grad:
                return with_gradient(plan, kernel, args)
    if profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
        function = counted_call(kernel)
    else:  # the same without a range: the call of counted_call costs 0.05 us
        next(kernel.count)
        function = kernel.call
    return op.outputs_of(function(*args, False)) if op.saved else function(*args)


def not_plain(op: Op, args: tuple[Any, ...]) -> bool:
    """Return True where no kernel may be called: something traces or transforms, or an argument is no plain tensor."""
    if is_dynamo_compiling() or jit_tracing() or dispatch_modes() or functorch_level() is not None:  # pyright: ignore
        return True
    if forward_ad._current_level >= 0:  # pyright: ignore
        return True
    for place in op.tensor_places:  # not any(...): a generator costs 0.4 us
        arg = args[place]
        if type(arg) not in OPTIONAL_TYPES and not isinstance(arg, int):  # a seed may be a number
            return True
    return False


def _not_plain(op: Op, args: tuple[Any, ...], backend: str | None, violated: Constraint | None) -> Any:
    """Serve a call with tensors of other kinds by the registered op, or raise InvalidInputError.

    Integers for floats are converted here, where a call with floats does not pass.
    """
    if isinstance(violated, PlainFloat):  # the last condition: the call is valid
        return call(op, with_floats(args, op.float_places), backend)
    if violated is not None and not isinstance(violated, PlainTensor):
        return _invalid(op, args, backend)
    tracer = _fx_tracer(args)
    if tracer is not None:
        return _recorded(op, args, backend, tracer)
    op.validate(args)
    specs = [name for name, arg in zip(op.parameters, args) if isinstance(arg, TensorSpec)]
    if specs:
        raise InvalidInputError(
            f"{op.name}: got {specs[0]} as a TensorSpec, expected a torch.Tensor; to fix: pass it to fusedops.explain"
        )
    return call_registered(op, args, backend)


def _invalid(op: Op, args: tuple[Any, ...], backend: str | None) -> Any:
    """Raise InvalidInputError for what violates a constraint, unless the values are to come."""
    tracer = _fx_tracer(args)
    if tracer is not None:
        return _recorded(op, args, backend, tracer)
    op.validate(args)
    raise AssertionError(f"the compiled check of {op.name} refuses what its constraints accept: {args!r}")


def _fx_tracer(args: tuple[Any, ...]) -> Any:
    """Return the tracer of torch.fx.symbolic_trace where an argument is one of its values, or None."""
    fx = modules.get("torch.fx")
    return None if fx is None else next((arg.tracer for arg in args if isinstance(arg, fx.Proxy)), None)


def _recorded(op: Op, args: tuple[Any, ...], backend: str | None, tracer: Any) -> Any:
    """Record a call of the public function, which draws a seed and selects a backend each time that the graph runs."""
    return tracer.create_proxy("call_function", op.function, (), {**dict(zip(op.parameters, args)), "backend": backend})

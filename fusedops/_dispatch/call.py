"""The path of a call, from the public function to a kernel.

Three branches: under torch.compile and wherever tensors are not plain (fake tensors, subclasses such as DTensor,
dispatch modes) the registered torch op; under functorch transforms and forward-mode differentiation the op's reference,
which torch can transform; else a kernel. The kernel is selected by the same plan in all of them.

The figures in comments are from a 2-core Zen 3 virtual machine, torch 2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, is_grad_enabled
from torch._C import (
    _len_torch_dispatch_stack as dispatch_modes,  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue,reportUnknownVariableType]
)
from torch._C._functorch import (
    peek_interpreter_stack as functorch_level,  # pyright: ignore[reportPrivateUsage,reportMissingModuleSource,reportUnknownVariableType]
)
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from fusedops._contract.plain_tensor import TENSOR_TYPES, PlainTensor
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
    if is_dynamo_compiling():
        return call_registered(op, args, backend)
    try:
        violated = op.check(*args)
    except (AttributeError, TypeError, RuntimeError):  # a value of another type; a nested tensor has no shape
        _invalid(op, args)
    if violated is not None or dispatch_modes():
        return _not_plain(op, args, backend, violated)
    if functorch_level() is not None or forward_ad._current_level >= 0:  # pyright: ignore
        return op.reference(*op.completed(args))
    plan = plan_for(op, args[0], backend)
    kernel = select(plan, args)
    if op.complete is not None:
        args = op.complete(args)  # after the selection: a call that is not served draws no random number
    return run(op, plan, kernel, args)


def run(op: Op, plan: Plan, kernel: PreparedKernel, args: tuple[Any, ...]) -> Any:
    """Call a selected kernel, with autograd where a gradient is wanted."""
    for place in op.gradient_places:
        tensor = args[place]
        if tensor is not None and tensor.requires_grad and is_grad_enabled():
            return with_gradient(plan, kernel, args)
    function = counted_call(kernel)
    return op.outputs_of(function(*args, False)) if op.saved else function(*args)


def not_plain(op: Op, args: tuple[Any, ...]) -> bool:
    """Return True where no kernel may be called: something traces or transforms, or a tensor is of a subclass."""
    if is_dynamo_compiling() or dispatch_modes() or functorch_level() is not None:  # pyright: ignore
        return True
    if forward_ad._current_level >= 0:  # pyright: ignore
        return True
    for place in op.tensor_places:  # not any(...): a generator costs 0.4 us
        arg = args[place]
        if type(arg) not in TENSOR_TYPES and isinstance(arg, Tensor):
            return True
    return False


def _not_plain(op: Op, args: tuple[Any, ...], backend: str | None, violated: Constraint | None) -> Any:
    """Serve a call with tensors of other kinds by the registered op, or raise InvalidInputError."""
    if violated is not None and not isinstance(violated, PlainTensor):
        _invalid(op, args)
    op.validate(args)
    specs = [name for name, arg in zip(op.parameters, args) if isinstance(arg, TensorSpec)]
    if specs:
        raise InvalidInputError(
            f"{op.name}: got {specs[0]} as a TensorSpec, expected a torch.Tensor; to fix: pass it to fusedops.explain"
        )
    return call_registered(op, args, backend)


def _invalid(op: Op, args: tuple[Any, ...]) -> NoReturn:
    op.validate(args)
    raise AssertionError(f"the compiled check of {op.name} refuses what its constraints accept: {args!r}")

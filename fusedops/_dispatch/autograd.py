"""Calls under autograd: forward by the selected kernel, backward by the kernel selected along with it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._C._autograd import (
    _get_current_graph_task_keep_graph as _graph_is_kept,  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue,reportUnknownVariableType]
)
from torch._C._autograd import (
    _top_saved_tensors_default_hooks as _saved_tensors_hooks,  # pyright: ignore[reportPrivateUsage,reportUnknownVariableType]
)
from torch._C._functorch import (
    is_legacy_batchedtensor,  # what is_grads_batched=True passes to backward
    unwrap_if_dead,
)
from torch._C._functorch import (
    peek_interpreter_stack as functorch_level,  # pyright: ignore[reportPrivateUsage,reportMissingModuleSource,reportUnknownVariableType]
)
from torch._functorch.utils import (
    unwrap_dead_wrappers,  # pyright: ignore[reportUnknownVariableType]
)
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from fusedops._dispatch.batched import run_batched
from fusedops._dispatch.held import is_held
from fusedops._dispatch.saved_sizes import changed_error, have_changed, sizes_of
from fusedops._dispatch.select import backward_plan, counted_call, select

if TYPE_CHECKING:
    from fusedops._contract.op import Op
    from fusedops._dispatch.plan import Plan
    from fusedops._plugins.record import PreparedKernel


class OpFunction(torch.autograd.Function):
    """The autograd Function of an op. Each op has a subclass, for the name."""

    @staticmethod
    def forward(ctx: Any, kernel: PreparedKernel, backward: PreparedKernel, *args: Any) -> Any:
        op = kernel.op
        parts = op.backward_call
        ctx.rest = backward, parts.values(args)
        # a hook may keep the tensors that it is given
        ctx.reuse = parts.reuses and _saved_tensors_hooks(True) is None  # pyright: ignore[reportUnnecessaryComparison]
        results = counted_call(kernel)(*args, True) if op.saved else counted_call(kernel)(*args)
        tensors = parts.tensors((*args, results) if op.single and not op.saved else (*args, *results))
        ctx.save_for_backward(*tensors)
        ctx.sizes = sizes_of(tensors)
        return op.outputs_of(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        backward, values = cast("tuple[PreparedKernel, tuple[Any, ...]]", ctx.rest)
        op, wanted, tensors = backward.op, ctx.needs_input_grad[2:], ctx.saved_tensors
        if have_changed(tensors, ctx.sizes, grads[0]):
            raise changed_error(op, tensors, ctx.sizes, grads[0])
        # create_graph=True, a batched or a dual gradient: a kernel's result has no graph, no batch and no tangent
        # compiled autograd batches nothing, and cannot trace the question
        batched = not is_dynamo_compiling() and any(map(is_legacy_batchedtensor, grads))
        if torch.is_grad_enabled() or transformed() or batched:
            tensors = op.backward_call.differentiable_tensors(tensors, values)
            run, reuse = partial(run_batched if batched else _run_reference, op), False
        else:
            run = partial(_run_kernel, backward)
            reuse = ctx.reuse and not _graph_is_kept() and not is_held(ctx, tensors, op.backward_call.saved_places)
        return None, None, *op.backward_call.gradients(grads, tensors, values, wanted, run, reuse=reuse)


def _run_reference(op: Op, args: Sequence[Any]) -> Any:
    return op.backward(*args)


def _run_kernel(backward: PreparedKernel, args: Sequence[Any]) -> Any:
    return counted_call(backward)(*args)


def _make_apply(op: Op) -> Any:
    """Make the op's Function, at its first gradient: creating one takes 0.6 ms."""
    function = type(op.name, (OpFunction,), {})
    # not Function.apply's own Python: its cases (functorch, setup_context) cannot occur here, and it costs 3 us
    op.autograd_apply = cast("Any", super(torch.autograd.Function, function)).apply
    return op.autograd_apply


def with_gradient(plan: Plan, kernel: PreparedKernel, args: tuple[Any, ...]) -> Any:
    """Call a kernel under autograd. The backward kernel is selected now, so that a refusal is seen in time."""
    after = plan.backward.get(kernel.backend)
    if after is None:
        after = backward_plan(plan, kernel.backend)
    backward = after.first
    if backward is None or not backward.unconditional:
        backward = select(after, kernel.op.stand_in(args))
    op = kernel.op
    for place in op.tensor_places:
        tensor = args[place]
        if tensor is not None and unwrap_if_dead(tensor) is not tensor:  # of a functorch transform that has ended
            args = unwrap_dead_wrappers(args)
            break
    return (op.autograd_apply or _make_apply(op))(kernel, backward, *args)


def transformed() -> bool:
    """Return True under a functorch transform or forward-mode differentiation, which transform plain torch alone."""
    return functorch_level() is not None or forward_ad._current_level >= 0  # pyright: ignore

"""The autograd Function of every op, for plain calls and for calls of the registered ops on other kinds of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from sys import modules
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, is_grad_enabled

from fusedops._dispatch.backward.batched import run_batched
from fusedops._dispatch.backward.held import is_held
from fusedops._dispatch.backward.saved_sizes import changed_error, differ, sizes_of
from fusedops._torch import (
    graph_is_kept,
    is_dynamo_compiling,
    is_legacy_batchedtensor,
    is_transformed,
    saved_tensors_hooks,
    set_node_apply,
    unwrap_if_dead,
)

if TYPE_CHECKING:
    from fusedops._contract.op import Op
    from fusedops._plugins.record import PreparedKernel


class OpFunction(torch.autograd.Function):
    """The autograd Function of an op. Each op has a subclass, for the name of its ``grad_fn``.

    Its first argument is a tuple, for each argument of ``apply`` costs 0.1 us: the op; ``forward``, a function that
    returns what a forward kernel does; ``backward``; ``plain``, True where the tensors are plain. Then come the op's
    arguments. For plain tensors ``backward`` is the kernel that was selected along with forward's. For others it is a
    function that calls the registered op of backward.
    """

    @staticmethod
    def forward(ctx: Any, kernels: tuple[Op, Any, Any, bool], *args: Any) -> Any:
        op, forward, _, plain = kernels
        call = op.backward_call
        # a hook may keep the tensors that it is given
        reuse = plain and call.reuses and saved_tensors_hooks(True) is None
        results = forward(*args, True) if op.saved else forward(*args)
        tensors = call.tensors((*args, results) if op.single and not op.saved else (*args, *results))
        ctx.save_for_backward(*tensors)
        outputs = op.outputs_of(results)
        if op.integers:
            ctx.mark_non_differentiable(*outputs[len(op.with_gradient) :])
        if plain:
            ctx.rest = kernels, call.values(args), reuse, sizes_of(tensors)
        else:
            ctx.set_materialize_grads(False)  # torch's zeros for a DTensor are a plain tensor
            ctx.rest = kernels, call.values(args), reuse, [_zeros_of(y) for y in op.as_tuple(outputs)]
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kernels, values, reuse, of_forward = ctx.rest
        op: Op = kernels[0]
        backward, plain = kernels[2:]
        call, tensors, compiling = op.backward_call, ctx.saved_tensors, is_dynamo_compiling()
        if op.integers:
            grads = grads[: len(op.with_gradient)]
        if plain:
            if differ(tensors, of_forward, grads[0]):
                raise changed_error(op, tensors, of_forward, grads[0])
            run = backward.run
        else:
            grads = tuple([zeros() if grad is None else grad for grad, zeros in zip(grads, of_forward)])
            run = backward
        # create_graph=True, a batched or a dual gradient: a kernel's result has no graph, no batch and no tangent
        # compiled autograd batches nothing, and cannot trace the question
        batched = not compiling and (is_legacy_batchedtensor(grads[0]) or (len(grads) > 1 and _are_batched(grads)))
        if batched or is_grad_enabled() or is_transformed():
            reuse = False
            tensors = call.differentiable_tensors(tensors, values)
            if plain:
                run = partial(run_batched if batched else _run_reference, op)
        elif plain and compiling:
            reuse = False
            run = partial(_run_registered, op, backward.backend)
        elif reuse:
            reuse = not graph_is_kept() and not is_held(ctx, tensors, call.saved_indices)
        # a number of a trace is a tensor, at which backward must not look
        look = plain or not any(isinstance(value, Tensor) for value in values)
        return None, *call.gradients(grads, tensors, values, ctx.needs_input_grad[1:], run, look, reuse)


_Run = Callable[[tuple[Any, ...]], Any]


def apply(
    op: Op,
    forward: Callable[..., Any],
    backward: PreparedKernel | _Run,
    plain: bool,
    args: Sequence[Any],
) -> Any:
    """Compute a call whose gradient is wanted.

    Args:
        op: the op.
        forward: returns what a forward kernel does, from the op's arguments (and ``save``, where the op saves values).
        backward: the kernel of the gradient; for tensors that are not plain, a function of backward's arguments.
        plain: True where every tensor is plain.
        args: all arguments, :func:`unwrapped`.

    Returns:
        What the public function returns.
    """
    return _apply_of(op)((op, forward, backward, plain), *args)


def unwrapped(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with the tensor in each wrapper of a functorch transform that has ended."""
    return tuple([unwrap_if_dead(arg) if isinstance(arg, Tensor) else arg for arg in args])


@cache
def _apply_of(op: Op) -> Callable[..., Any]:
    """Return ``apply`` of the op's Function, made at its first gradient: creating a Function takes 0.6 ms."""
    function = type(op.name, (OpFunction,), {})
    set_node_apply(function, OpFunction.backward)
    # not Function.apply's own Python: its cases (functorch, setup_context) cannot occur here, and it costs 3 us
    return cast("Any", super(torch.autograd.Function, function)).apply


def _are_batched(grads: Sequence[Any]) -> bool:
    for grad in grads:  # not any(...): a generator costs 0.4 us
        if is_legacy_batchedtensor(grad):
            return True
    return False


def _run_reference(op: Op, args: Sequence[Any]) -> Any:
    return op.backward(*args)


def _run_registered(op: Op, backend: str, args: Sequence[Any]) -> Any:
    """Call the registered op, which compiled autograd takes into its graph; a kernel's Python would break it."""
    return getattr(torch.ops.fusedops, f"{op.name}_backward").default(*args, backend=backend)


def _zeros_of(y: Tensor) -> Callable[[], Tensor]:
    """Return a function that makes zeros like an output, for the gradient of one that the loss does not use."""
    if type(y) is not Tensor and "torch.distributed.tensor" in modules:
        from torch.distributed import tensor

        if isinstance(y, tensor.DTensor):
            placed: Any = {"device_mesh": y.device_mesh, "placements": y.placements}
            return partial(tensor.zeros, tuple(y.shape), dtype=y.dtype, **placed)
    return partial(torch.zeros, tuple(y.shape), dtype=y.dtype, device=y.device)

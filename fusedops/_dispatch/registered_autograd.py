"""Autograd of the registered ops: their gradients, and second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from sys import modules
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _len_torch_dispatch_stack as dispatch_modes,  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue,reportUnknownVariableType]
)
from torch._C._functorch import is_legacy_batchedtensor
from torch.compiler import is_dynamo_compiling

from fusedops._contract.op import Op
from fusedops._contract.plain_argument import TENSOR_TYPES
from fusedops._contract.signature import float_places
from fusedops._dispatch.autograd import transformed
from fusedops._dispatch.registered_kernels import BackwardKernels, ForwardKernels, whole_arguments
from fusedops._dispatch.registered_numbers import NumberTensors, as_tensors, has_symbolic_numbers
from fusedops._dispatch.saved_sizes import changed_error, have_changed, sizes_of
from fusedops._policy import context

Kernels = ForwardKernels | BackwardKernels | NumberTensors
# the arguments of a registered op's Function before those of the op
_BEFORE_ARGS = 2


def autograd_of(
    op: Op, backward: BackwardKernels, numbers: bool = False
) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return the backward and the setup_context of the registered op (with its saved values, where it has some).

    Args:
        op: the op.
        backward: serves gradients of plain tensors.
        numbers: True for its overload ``numbers``, whose floats are tensors.
    """
    parts = op.backward_call
    overload = "numbers" if numbers and float_places(op.backward_types) else "default"
    required = [value.name for value in op.saved if not value.optional]

    def keep(ctx: Any, inputs: tuple[Any, ...], backend: str | None, output: Any) -> None:
        ctx.backend = backend
        ctx.block = context.frame.get()
        inputs = whole_arguments(op, inputs)
        results = [output] if op.single and not op.saved else list(output)
        saved = iter(results[len(op.outputs) :])
        values = [None if value.optional else next(saved) for value in op.saved]
        ctx.set_materialize_grads(False)  # so that a saved value's gradient is None except in a second derivative
        ctx.zeros_of = [_zeros_of(y) for y in results[: len(op.outputs)]]
        kept = parts.tensors((*inputs, *results[: len(op.outputs)], *values))
        ctx.save_for_backward(*kept)
        ctx.sizes = sizes_of(kept) if not is_dynamo_compiling() and is_direct(kept) else None
        ctx.rest = parts.values(inputs)

    def differentiate(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        # arguments left out of the call are not in needs_input_grad
        wanted = (*ctx.needs_input_grad[_BEFORE_ARGS:], *[False] * len(op.parameters))[: len(op.parameters)]
        function = getattr(getattr(torch.ops.fusedops, f"{op.name}_backward"), overload)

        def run(args: tuple[Any, ...]) -> Any:
            if is_dynamo_compiling():  # compiled autograd, which cannot trace the blocks below
                return function(*args, backend=ctx.backend)
            # backward may run on another thread, or after `with use(...)` has ended
            with context.within(ctx.block):
                if torch.is_grad_enabled() or transformed() or any(map(is_legacy_batchedtensor, args[: len(grads)])):
                    return function(*args, backend=ctx.backend)
                if not numbers and is_direct(args):  # autograd has checked the gradients, and the sizes are forward's
                    return backward.serve(args, ctx.backend)
                with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateUsage]
                    return function(*args, backend=ctx.backend)  # the Autograd key would only pass the call on

        tensors, values = ctx.saved_tensors, ctx.rest
        if ctx.sizes is not None and not is_dynamo_compiling():
            first = next((grad for grad in grads if grad is not None), None)
            if first is not None and have_changed(tensors, ctx.sizes, first):
                raise changed_error(op, tensors, ctx.sizes, first)
        of_outputs = list(grads[: len(op.outputs)])
        of_saved = {name: grad for name, grad in zip(required, grads[len(op.outputs) :]) if grad is not None}
        more = parts.of_saved(tensors, values, of_saved) if of_saved else {}
        for at, zeros in enumerate(ctx.zeros_of):
            grad, extra = of_outputs[at], more.pop(op.outputs[at], None)
            if grad is None:
                grad = zeros() if extra is None else extra
            elif extra is not None:
                grad = grad + extra
            of_outputs[at] = grad
        gradients = parts.gradients(of_outputs, tensors, values, wanted, run, look_at_values=not numbers)
        for name, gradient in more.items():
            at = op.parameters.index(name)
            gradients[at] = gradient if gradients[at] is None else gradients[at] + gradient
        return tuple(gradients)

    return differentiate, keep


def _zeros_of(y: Tensor) -> Callable[[], Tensor]:
    """Return a function that makes zeros like an output, for the gradient of one that the loss does not use."""
    if type(y) is not Tensor and "torch.distributed.tensor" in modules:
        from torch.distributed import tensor

        if isinstance(y, tensor.DTensor):
            placed: Any = {"device_mesh": y.device_mesh, "placements": y.placements}
            return partial(tensor.zeros, tuple(y.shape), dtype=y.dtype, **placed)
    return partial(torch.zeros, tuple(y.shape), dtype=y.dtype, device=y.device)


def is_direct(args: Sequence[Any]) -> bool:
    """Return True if torch's dispatcher would pass a call below autograd to a kernel unchanged, which takes 10 us.

    It has something to do with subclasses (DTensor, fake and functional tensors), meta tensors and in dispatch modes.
    """
    if dispatch_modes():
        return False
    for arg in args:
        if isinstance(arg, Tensor) and (type(arg) not in TENSOR_TYPES or arg.is_meta):
            return False
    return True


def _function_of(
    name: str,
    overload: str,
    differentiate: Callable[..., Any],
    keep: Callable[..., None],
    run: Callable[..., Any],
) -> Any:
    """Return the autograd Function whose forward is a registered op, called below autograd.

    It is what torch.library.register_autograd makes, without its reading of the schema in each call, which takes 20 us.
    """
    function = getattr(getattr(torch.ops.fusedops, name), overload)

    def forward(ctx: Any, keys: Any, backend: str | None, *args: Any) -> Any:
        output = run(*args, backend=backend) if is_direct(args) else _below_autograd(function, keys, args, backend)
        keep(ctx, args, backend, output)
        return output

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (*[None] * _BEFORE_ARGS, *differentiate(ctx, *grads))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)


def _below_autograd(function: Any, keys: Any, args: tuple[Any, ...], backend: str | None) -> Any:
    """Call a registered op for the keys after autograd's."""
    with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateUsage]
        after = keys & torch._C._after_autograd_keyset  # pyright: ignore[reportPrivateUsage]
        return function.redispatch(after, *args, backend=backend)


def autograd_kernel(
    name: str,
    kernels: Kernels,
    differentiate: Callable[..., Any],
    keep: Callable[..., None],
    prepare: Callable[[], None],
    overload: str = "default",
    saving: tuple[str, Kernels] | None = None,
    outputs_of: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:
    """Return the kernel for the Autograd key.

    torch's autograd of registered ops refuses torch.func.grad, and drops a forward-mode tangent without an error:
    there, and under vmap, the op becomes its reference. torch.compile traces through transforms in the same way.

    Args:
        name: the registered op.
        kernels: its computations.
        differentiate: the backward of its Function.
        keep: saves for backward what a call of the op, or of ``saving``, was called with and returned.
        prepare: makes sure that the op is registered.
        overload: of the op.
        saving: the registered op that is called where a gradient is wanted, and its computations. None: the op itself.
        outputs_of: picks the op's results from those of ``saving``.
    """

    @cache  # at the first call: it needs the op's overload, and creating a Function takes 0.2 ms
    def applied() -> Any:
        called, computations = saving or (name, kernels)
        return _function_of(called, overload, differentiate, keep, computations.run).apply

    @cache
    def function() -> Any:
        return getattr(getattr(torch.ops.fusedops, name), overload)

    def autograd(keys: Any, *args: Any, backend: str | None = None) -> Any:
        prepare()
        if transformed():
            return kernels.reference(*args)
        if torch.is_grad_enabled():
            for arg in args:
                if isinstance(arg, Tensor) and arg.requires_grad:
                    results: Any = applied()(keys, backend, *args)
                    return results if outputs_of is None else outputs_of(results)
        return _below_autograd(function(), keys, args, backend)

    return autograd


def with_symbolic_numbers(
    op: Op, name: str, places: Sequence[int], reference: Callable[..., Any], autograd: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``autograd``, with a call that has symbolic floats made a call of the overload ``numbers``."""
    defaults = op.defaults if name != f"{op.name}_backward" else ()

    def autograd_or_numbers(keys: Any, *args: Any, **backend: Any) -> Any:
        if not has_symbolic_numbers(args, places) or _is_distributed(args):
            return autograd(keys, *args, **backend)
        if transformed():
            return reference(*args)
        args = (*args, *defaults[len(args) :])
        return getattr(torch.ops.fusedops, name).numbers(*as_tensors(args, places), **backend)

    return autograd_or_numbers


def _is_distributed(args: Sequence[Any]) -> bool:
    distributed = modules.get("torch.distributed.tensor")
    return distributed is not None and any(isinstance(arg, distributed.DTensor) for arg in args)


def keep_everything(ctx: Any, inputs: tuple[Any, ...], backend: str | None, output: Any) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
    ctx.rest = [None if isinstance(value, Tensor) else (value,) for value in inputs]


def double_backward(reference: Callable[..., Any], single: bool, numbers: Sequence[int] = ()) -> Callable[..., Any]:
    """Return the derivative of the reference backward: a registered backward without one would be wrong silently.

    Args:
        reference: the reference backward.
        single: True where it returns one gradient.
        numbers: the places of the floats that are tensors, which have no gradient.
    """

    def differentiate(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        tensors = iter(ctx.saved_tensors)
        args = [next(tensors) if boxed is None else boxed[0] for boxed in ctx.rest]
        tensors_at = [place for place, arg in enumerate(args) if isinstance(arg, Tensor) and arg.is_floating_point()]
        places = [place for place in tensors_at if place not in numbers]

        def gradient(*inputs: Tensor) -> Any:
            changed = list(args)
            for place, value in zip(places, inputs):
                changed[place] = value
            return reference(*changed)

        pullback = torch.func.vjp(gradient, *(args[place] for place in places))[1]
        by_place = dict(zip(places, pullback(grads[0] if single else grads)))
        return tuple(by_place.get(place) for place in range(len(args)))

    return differentiate

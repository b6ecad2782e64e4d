"""Autograd of the registered ops: their gradients, and second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from sys import modules
from typing import Any, cast

import torch
from torch import Tensor
from torch._library.autograd import (  # what torch.library.register_autograd is made of
    Info,
    make_autograd_impl,  # pyright: ignore[reportUnknownVariableType]
)
from torch.compiler import is_dynamo_compiling

from fusedops._contract.op import Op
from fusedops._contract.signature import float_places
from fusedops._dispatch.autograd import transformed
from fusedops._dispatch.registered_kernels import whole_arguments
from fusedops._dispatch.registered_numbers import as_tensors, has_symbolic_numbers
from fusedops._policy import context


def autograd_of(op: Op, numbers: bool = False) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return the backward and the setup_context of the registered op (with its saved values, where it has some).

    Args:
        op: the op.
        numbers: True for its overload ``numbers``, whose floats are tensors.
    """
    parts = op.backward_call
    overload = "numbers" if numbers and float_places(op.backward_types) else "default"
    required = [value.name for value in op.saved if not value.optional]

    def keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
        ctx.backend, ctx.block = keyword_only_inputs["backend"], context.frame.get()
        inputs = whole_arguments(op, inputs)
        results = [output] if op.single and not op.saved else list(output)
        saved = iter(results[len(op.outputs) :])
        values = [None if value.optional else next(saved) for value in op.saved]
        ctx.set_materialize_grads(False)  # so that a saved value's gradient is None except in a second derivative
        ctx.zeros_of = [_zeros_of(y) for y in results[: len(op.outputs)]]
        ctx.save_for_backward(*parts.tensors((*inputs, *results[: len(op.outputs)], *values)))
        ctx.rest = parts.values(inputs)

    def differentiate(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        # arguments left out of the call are not in needs_input_grad
        wanted = (*ctx.needs_input_grad, *[False] * len(op.parameters))[: len(op.parameters)]
        function = getattr(getattr(torch.ops.fusedops, f"{op.name}_backward"), overload)

        def run(args: tuple[Any, ...]) -> Any:
            # backward may run on another thread, or after `with use(...)` has ended. Compiled autograd cannot trace it
            with nullcontext() if is_dynamo_compiling() else context.within(ctx.block):
                return function(*args, backend=ctx.backend)

        tensors, values = ctx.saved_tensors, ctx.rest
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


def autograd_kernel(
    name: str,
    reference: Callable[..., Any],
    differentiate: Callable[..., Any],
    keep: Callable[..., None],
    prepare: Callable[[], None],
    overload: str = "default",
) -> Callable[..., Any]:
    """Return the kernel for the Autograd key.

    torch's autograd of registered ops refuses torch.func.grad, and drops a forward-mode tangent without an error:
    there, and under vmap, the op becomes its reference. torch.compile traces through transforms in the same way.
    """
    made: list[Callable[..., Any]] = []

    def autograd(keys: Any, *args: Any, **backend: Any) -> Any:
        if not made:  # at the first call: it needs the op's overload, and costs 0.2 ms
            function = getattr(getattr(torch.ops.fusedops, name), overload)
            made.append(cast("Callable[..., Any]", make_autograd_impl(function, Info(differentiate, keep))))
        prepare()
        return reference(*args) if transformed() else made[0](keys, *args, **backend)

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


def autograd_through_saved(
    op: Op, reference: Callable[..., Any], prepare: Callable[[], None], name: str = "default"
) -> Callable[..., Any]:
    """Return the Autograd kernel of an op with saved values: ``<op>_with_saved`` where a gradient is wanted."""

    def autograd(keys: Any, *args: Any, **backend: Any) -> Any:
        prepare()
        if transformed():
            return reference(*args)
        wanted = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        if torch.is_grad_enabled() and wanted:
            results = getattr(getattr(torch.ops.fusedops, f"{op.name}_with_saved"), name)(*args, **backend)
            return op.outputs_of(results)
        with torch._C._AutoDispatchBelowAutograd():  # pyright: ignore[reportPrivateUsage]
            overload = getattr(getattr(torch.ops.fusedops, op.name), name)
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *args, **backend)  # pyright: ignore[reportPrivateUsage]

    return autograd


def keep_everything(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
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

"""The ops as ``torch.ops.fusedops.*``: what torch.compile, export, fake tensors and tensor subclasses see.

Registered for CompositeExplicitAutograd, so that every device is served; registering for the CPU and CUDA keys alone
would shut Ascend (PrivateUse1) out. All parameters are positional but ``backend``: torch's autograd registration takes
no keyword-only tensors, and a dropout's seed is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch._library.autograd import (  # what torch.library.register_autograd is made of
    Info,
    make_autograd_impl,  # pyright: ignore[reportUnknownVariableType]
)
from torch.compiler import is_dynamo_compiling

from fusedops import _dispatch, _in_force
from fusedops._gradient import transformed
from fusedops._op import Op

_library = torch.library.Library("fusedops", "DEF")
_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float": "float",
    "bool": "bool",
    "int": "int",
    "str": "str",
    "tuple[bool, ...]": "bool[]",
    "torch.dtype": "ScalarType",
}


def register_op(op: Op) -> None:
    """Defines ``torch.ops.fusedops.<op>`` and ``<op>_backward`` with kernels, fake kernels and autograd."""
    defaults = [parameter.default for parameter in op.signature.parameters.values()]
    single = len(op.differentiable) == 1

    def whole(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*args, *defaults[len(args) :])  # torch leaves out trailing arguments that equal the schema's default

    def forward(*args: Any, backend: str | None = None) -> torch.Tensor:
        return _dispatch.run_forward(op, whole(args), backend)

    def forward_fake(*args: Any, backend: str | None = None) -> torch.Tensor:
        given = whole(args)
        op.validate(*given)
        return op.output(*given)

    def meaning(*args: Any, backend: str | None = None) -> torch.Tensor:
        given = whole(args)
        op.validate(*given)
        return op.call_reference(given)

    def keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: torch.Tensor) -> None:
        ctx.backend, ctx.frame = keyword_only_inputs["backend"], _in_force.frame.get()
        _save(ctx, op.backward_args(None, output, inputs, ())[1:])

    def differentiate(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        wanted: dict[str, bool] = dict(zip(op.parameters, ctx.needs_input_grad))  # arguments left out are not in it
        needs = tuple(wanted.get(name, False) for name in op.differentiable)
        found: dict[str, Any] = {op.passed_through: grad} if op.passed_through else {}
        kept = _saved(ctx) if any(needs) else []
        if op.identity is not None and needs[0]:
            others = (value for (what, _), value in zip(op.kept, kept) if what != "needs")
            if op.identity(grad, *others):
                found[op.parameters[0]], needs = grad, (False, *needs[1:])
        if any(needs):
            args = [needs if what == "needs" else value for (what, _), value in zip(op.kept, kept)]
            function = getattr(torch.ops.fusedops, f"{op.name}_backward").default
            # backward may run on another thread, or after `with use(...)` has ended. Compiled autograd cannot trace it
            with nullcontext() if is_dynamo_compiling() else _in_force.within(ctx.frame):
                gradients = function(grad, *args, backend=ctx.backend)
            gradients = (gradients,) if single else gradients
            found.update((name, g) for name, g, need in zip(op.differentiable, gradients, needs) if need)
        return tuple(found.get(name) for name in op.parameters)

    def backward(*args: Any, backend: str | None = None) -> Any:
        return _given(_dispatch.run_backward(op, args, backend), args[0])

    def backward_fake(*args: Any, backend: str | None = None) -> Any:
        with torch.no_grad():
            gradients = _given(op.backward(*args), args[0])
        made = [
            torch.empty_like(g, memory_format=torch.contiguous_format) for g in ((gradients,) if single else gradients)
        ]
        return made[0] if single else tuple(made)

    def backward_meaning(*args: Any, backend: str | None = None) -> Any:
        return _given(op.backward(*args), args[0])

    def keep_all(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
        _save(ctx, inputs)

    def differentiate_again(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        # the derivative of the reference backward: a backward op without it would be silently wrong the second time
        args = _saved(ctx)
        places = [place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor) and arg.is_floating_point()]

        def gradient(*inputs: torch.Tensor) -> Any:
            changed = list(args)
            for place, value in zip(places, inputs):
                changed[place] = value
            return backward_meaning(*changed)

        pullback = torch.func.vjp(gradient, *(args[place] for place in places))[1]
        found = dict(zip(places, pullback(grads[0] if single else grads)))
        return tuple(found.get(place) for place in range(len(args)))

    _define(op.name, op.signature, "Tensor", forward, forward_fake, meaning, differentiate, keep)
    returned = "Tensor" if single else f"({', '.join(['Tensor'] * len(op.differentiable))})"
    name = f"{op.name}_backward"
    _define(
        name, op.backward_signature, returned, backward, backward_fake, backward_meaning, differentiate_again, keep_all
    )


def _define(
    name: str,
    signature: inspect.Signature,
    returned: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    meaning: Callable[..., Any],
    differentiate: Callable[..., Any],
    keep: Callable[..., None],
) -> None:
    _library.define(f"{name}({_schema(signature)}) -> {returned}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedops::{name}", fake, lib=_library)
    # torch's autograd of registered ops refuses torch.func.grad and loses a forward-mode tangent without a word: there,
    # and under vmap, the op is taken apart into its meaning. By this way torch.compile sees through transforms too
    overload = getattr(torch.ops.fusedops, name).default
    gradients = cast("Callable[..., Any]", make_autograd_impl(overload, Info(differentiate, keep)))

    def autograd(keys: Any, *args: Any, **backend: Any) -> Any:
        _dispatch.know_dtensor()
        return meaning(*args) if transformed() else gradients(keys, *args, **backend)

    _library.impl(name, autograd, "Autograd", with_keyset=True)
    _library.impl(name, meaning, "FuncTorchBatched")


def _schema(signature: inspect.Signature) -> str:
    """The signature in torch's schema language, with ``backend`` as the one keyword-only argument."""
    parts: list[str] = []
    for parameter in signature.parameters.values():
        default = parameter.default
        text = f"{_TYPES[str(parameter.annotation)]} {parameter.name}"
        if default is not parameter.empty:
            text += f'="{default}"' if isinstance(default, str) else f"={default}"
        parts.append(text)
    return ", ".join([*parts, "*", "str? backend=None"])


def _save(ctx: Any, values: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*(value for value in values if isinstance(value, torch.Tensor)))
    ctx.rest = [None if isinstance(value, torch.Tensor) else (value,) for value in values]


def _saved(ctx: Any) -> list[Any]:
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if boxed is None else boxed[0] for boxed in ctx.rest]


def _given(gradients: Any, like: torch.Tensor) -> Any:
    """The gradients with an empty tensor for each that was not wanted: a torch op returns no None."""
    if not isinstance(gradients, tuple):
        return gradients
    several: tuple[torch.Tensor | None, ...] = gradients  # pyright: ignore[reportUnknownVariableType]
    return tuple(like.new_empty(0) if gradient is None else gradient for gradient in several)

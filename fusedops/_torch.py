"""The ops as ``torch.ops.fusedops.*``: what torch.compile, export, fake tensors and tensor subclasses see.

Registered for CompositeExplicitAutograd, so that every device is served; registering for the CPU and CUDA keys alone
would shut Ascend (PrivateUse1) out.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch

from fusedops import _dispatch
from fusedops._op import Op, split

_library = torch.library.Library("fusedops", "DEF")
_TYPES = {"Tensor": "Tensor", "Tensor | None": "Tensor?", "float": "float", "bool": "bool", "int": "int", "str": "str"}


def register_op(op: Op) -> None:
    """Defines ``torch.ops.fusedops.<op>`` and ``<op>_backward`` with kernels, fake kernels and autograd."""

    def forward(*args: Any, backend: str | None = None, **kwargs: Any) -> torch.Tensor:
        return _dispatch.run_forward(op, _all(op.signature, args, kwargs), backend)

    def forward_fake(*args: Any, backend: str | None = None, **kwargs: Any) -> torch.Tensor:
        given = _all(op.signature, args, kwargs)
        op.validate(*given)
        return op.output(*given)

    def keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: torch.Tensor) -> None:
        ctx.backend = keyword_only_inputs["backend"]
        args = (*inputs, *(keyword_only_inputs[name] for name in op.parameters[len(inputs) :]))
        values = [output if position is None else args[position] for position in op.backward_positions]
        ctx.save_for_backward(*(value for value in values if isinstance(value, torch.Tensor)))
        ctx.rest = [None if isinstance(value, torch.Tensor) else (value,) for value in values]

    def differentiate(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        values = [next(saved) if boxed is None else boxed[0] for boxed in ctx.rest]
        positional, keywords = split(op.backward_signature, (grad, *values))
        function = getattr(torch.ops.fusedops, f"{op.name}_backward").default
        gradients = function(*positional, **keywords, backend=ctx.backend)
        return _placed(op.parameters[: _count(op.signature)], op.differentiable, gradients)

    def backward(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return _dispatch.run_backward(op, _all(op.backward_signature, args, kwargs), backend)

    def backward_fake(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        with torch.no_grad():
            return op.call_backward(_all(op.backward_signature, args, kwargs))

    def keep_all(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
        args = (*inputs, *(keyword_only_inputs[name] for name in op.backward_parameters[len(inputs) :]))
        ctx.save_for_backward(*(value for value in args if isinstance(value, torch.Tensor)))
        ctx.rest = [None if isinstance(value, torch.Tensor) else (value,) for value in args]

    def differentiate_again(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        # the derivative of the reference backward: a backward op without it would be silently wrong the second time
        tensors = ctx.saved_tensors

        def gradient(*inputs: torch.Tensor) -> Any:
            given = iter(inputs)
            return op.call_backward([next(given) if boxed is None else boxed[0] for boxed in ctx.rest])

        pullback = torch.func.vjp(gradient, *tensors)[1]
        found = iter(pullback(grads[0] if len(op.differentiable) == 1 else grads))
        count = _count(op.backward_signature)
        return tuple(next(found) if boxed is None else None for boxed in ctx.rest[:count])

    outputs = len(op.differentiable)
    returned = "Tensor" if outputs == 1 else f"({', '.join(['Tensor'] * outputs)})"
    _define(op.name, op.signature, "Tensor", forward, forward_fake, differentiate, keep)
    name = f"{op.name}_backward"
    _define(name, op.backward_signature, returned, backward, backward_fake, differentiate_again, keep_all)


def _define(
    name: str, signature: inspect.Signature, returned: str, run: Any, fake: Any, differentiate: Any, keep: Any
) -> None:
    _library.define(f"{name}({_schema(signature)}) -> {returned}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedops::{name}", fake, lib=_library)
    torch.library.register_autograd(f"fusedops::{name}", differentiate, setup_context=keep, lib=_library)


def _schema(signature: inspect.Signature) -> str:
    """The signature in torch's schema language, with ``backend`` as a last keyword-only argument."""
    parts: list[str] = []
    starred = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        text = f"{_TYPES[str(parameter.annotation)]} {parameter.name}"
        if parameter.default is not parameter.empty:
            text += f"={parameter.default}"
        parts.append(text)
    return ", ".join([*parts, *([] if starred else ["*"]), "str? backend=None"])


def _all(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Every argument in order: torch leaves out those that equal the schema's default."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return tuple(bound.arguments[name] for name in signature.parameters)


def _count(signature: inspect.Signature) -> int:
    return sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in signature.parameters.values())


def _placed(names: tuple[str, ...], differentiable: tuple[str, ...], gradients: Any) -> tuple[Any, ...]:
    """A gradient, or None, for each of ``names``."""
    several = cast("tuple[Any, ...]", gradients if isinstance(gradients, tuple) else (gradients,))
    found = dict(zip(differentiable, several))
    return tuple(found.get(name) for name in names)

"""The ops as ``torch.ops.fusedops.*``: what torch.compile, export, fake tensors and tensor subclasses use.

Registered for CompositeExplicitAutograd, so that every device is served; the CPU and CUDA keys alone would exclude
Ascend (PrivateUse1). All parameters are positional except ``backend``: torch's autograd registration takes no
keyword-only tensors, and a dropout's seed is one.

``<op>`` returns the outputs. An op with saved values also has ``<op>_with_saved``, which returns the outputs and the
required saved values; autograd calls that one. ``<op>_backward`` returns the gradients, an empty tensor for each that
is not wanted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from sys import modules
from typing import Any

import torch

from fusedops._contract.op import Op
from fusedops._contract.signature import float_places
from fusedops._dispatch.registered_autograd import (
    Kernels,
    autograd_kernel,
    autograd_of,
    double_backward,
    keep_everything,
    with_symbolic_numbers,
)
from fusedops._dispatch.registered_kernels import BackwardKernels, ForwardKernels
from fusedops._dispatch.registered_numbers import NumberTensors
from fusedops._plugins.registry import registry
from fusedops._policy.policy import check_text
from fusedops.errors import InvalidInputError

_libraries: dict[str, torch.library.Library] = {}
_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float": "Scalar",  # not float, of which a symbolic one would be a constant of the graph
    "float | None": "Scalar?",
    "bool": "bool",
    "int": "int",
    "int | None": "int?",
    "str": "str",
    "tuple[bool, ...]": "bool[]",
    "tuple[int, int] | None": "int[]?",
    "torch.dtype": "ScalarType",
}


def call_registered(op: Op, args: Sequence[Any], backend: str | None) -> Any:
    """Call ``torch.ops.fusedops.<op>``."""
    prepare(op.name)
    if backend is not None:
        check_text(backend, "backend=")
    return getattr(torch.ops.fusedops, op.name).default(*op.completed(tuple(args)), backend=backend)


def prepare(name: str) -> None:
    """Make sure that an op is registered, and that the rules for DTensor are once there can be one."""
    if name not in _libraries:
        registry.records()  # a plugin's op: plugins are loaded when first needed
    if name not in _libraries:
        raise InvalidInputError(
            f"{name}: got a call of an op that is not registered, expected one of {', '.join(sorted(_libraries))}; to "
            f"fix: call fusedops.register(OP), or return it from the plugin's fusedops_op"
        )
    if "torch.distributed.tensor" in modules:
        import fusedops._dispatch.dtensor as dtensor

        dtensor.register_rules(name)


# called while tracing, never traced: the mark of torch.compiler.assume_constant_result, which would load dynamo
prepare._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def register_op(op: Op) -> None:
    """Define the registered ops of an op: forward, forward with saved values, and backward."""
    library = torch.library.Library("fusedops", "FRAGMENT")
    _libraries[op.name] = library
    outputs = ["Tensor"] * len(op.outputs)
    ready = partial(prepare, op.name)
    places = op.float_places
    gradient = BackwardKernels(op)
    for numbers in (False, True) if places else (False,):
        overload = "numbers" if numbers else "default"
        differentiate, keep = autograd_of(op, gradient, numbers)
        given = _parameters(op.types, (), places) if numbers else _parameters(op.types, op.defaults)
        forward = _kernels(ForwardKernels(op, save=False), numbers, places)
        if op.saved:
            name, saving = f"{op.name}_with_saved", _kernels(ForwardKernels(op, save=True), numbers, places)
            required = ["Tensor" for value in op.saved if not value.optional]
            autograd = autograd_kernel(name, saving, differentiate, keep, ready, overload)
            if places and not numbers:
                autograd = with_symbolic_numbers(op, name, places, saving.reference, autograd)
            _define(library, name, overload, f"({given}) -> {_types(outputs + required)}", saving, autograd)
            autograd = autograd_kernel(
                op.name, forward, differentiate, keep, ready, overload, (name, saving), op.outputs_of
            )
        else:
            autograd = autograd_kernel(op.name, forward, differentiate, keep, ready, overload)
        if places and not numbers:
            autograd = with_symbolic_numbers(op, op.name, places, forward.reference, autograd)
        _define(library, op.name, overload, f"({given}) -> {_types(outputs)}", forward, autograd)
    name, places = f"{op.name}_backward", float_places(op.backward_types)
    gradients, single = _types(["Tensor"] * len(op.differentiable)), len(op.differentiable) == 1
    for numbers in (False, True) if places else (False,):
        overload = "numbers" if numbers else "default"
        given = _parameters(op.backward_types, (), places if numbers else ())
        backward = _kernels(gradient, numbers, places)
        second = double_backward(backward.reference, single, places if numbers else ())
        autograd = autograd_kernel(name, backward, second, keep_everything, ready, overload)
        if places and not numbers:
            autograd = with_symbolic_numbers(op, name, places, backward.reference, autograd)
        _define(library, name, overload, f"({given}) -> {gradients}", backward, autograd)


def unregister_op(op: Op) -> None:
    """Remove the registered ops of an op."""
    library = _libraries.pop(op.name, None)
    if library is not None:
        library._destroy()  # pyright: ignore[reportPrivateUsage]


def _types(types: list[str]) -> str:
    return types[0] if len(types) == 1 else f"({', '.join(types)})"


def _kernels(kernels: ForwardKernels | BackwardKernels, numbers: bool, places: Sequence[int]) -> Kernels:
    return NumberTensors(kernels, places) if numbers else kernels


def _parameters(types: Mapping[str, str], defaults: Sequence[Any], tensors: Sequence[int] = ()) -> str:
    """Return parameters in torch's schema language, those at the places ``tensors`` as tensors."""
    declared: list[str] = []
    for place, (name, text) in enumerate(types.items()):
        text = text.replace("float", "Tensor") if place in tensors else text
        declared.append(_schema(name, text, defaults[place] if defaults else inspect.Parameter.empty))
    return ", ".join([*declared, "*", "str? backend=None"])


def _schema(name: str, text: str, default: Any = inspect.Parameter.empty) -> str:
    """Return a parameter in torch's schema language."""
    if text not in _SCHEMA_TYPES:
        raise ValueError(f"got parameter {name!r} annotated {text!r}, expected one of {', '.join(_SCHEMA_TYPES)}")
    declared = f"{_SCHEMA_TYPES[text]} {name}"
    if default is inspect.Parameter.empty:
        return declared
    return f'{declared}="{default}"' if isinstance(default, str) else f"{declared}={default}"


def _define(
    library: torch.library.Library,
    name: str,
    overload: str,
    schema: str,
    kernels: Kernels,
    autograd: Callable[..., Any],
) -> None:
    name = name if overload == "default" else f"{name}.{overload}"
    library.define(f"{name}{schema}")
    library.impl(name, kernels.run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusedops::{name}", kernels.fake, lib=library)
    library.impl(name, autograd, "Autograd", with_keyset=True)
    library.impl(name, kernels.reference, "FuncTorchBatched")


registry.on_new_op.append(register_op)
registry.on_removed_op.append(unregister_op)

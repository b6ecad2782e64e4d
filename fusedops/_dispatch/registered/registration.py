"""The registration of each op with torch, as ``torch.ops.fusedops.<op>`` and ``torch.ops.fusedops.<op>_backward``.

Registered for CompositeExplicitAutograd, so that every device is served; the CPU and CUDA keys alone would exclude
Ascend (PrivateUse1).

``<op>`` returns the outputs. An op with required saved values has the parameter ``save`` and returns them after the
outputs, an empty tensor for each without ``save``; autograd calls it with ``save``. ``<op>_backward`` returns the
gradients, an empty tensor for each that is not wanted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from sys import modules
from threading import Lock
from typing import Any
from zlib import crc32

import torch

from fusedops._contract.op import Op
from fusedops._contract.signature import float_indices
from fusedops._dispatch.registered.autograd_keys import BackwardAutograd, ForwardAutograd, Implementations
from fusedops._dispatch.registered.implementations import BackwardImpl, ForwardImpl
from fusedops._dispatch.registered.schema import backward_schema, forward_schema
from fusedops._dispatch.registered.symbolic_floats import SymbolicFloats
from fusedops._plugins.registry import registry
from fusedops._policy.policy import check_text
from fusedops._report.user_frame import user_stack_level
from fusedops._torch import define, destroy, implement, is_onnx_export, register_fake
from fusedops._version import __version__
from fusedops.errors import FusedOpsWarning, InvalidInputError

_libraries: dict[str, torch.library.Library] = {}
_with_floats: dict[str, Op] = {}  # those whose overloads "symbolic" are not defined yet: a third of what all ops take
_schemas: dict[str, str] = {}  # of the registered ops, by name
_lock = Lock()


def call_registered(op: Op, args: Sequence[Any], backend: str | None) -> Any:
    """Call ``torch.ops.fusedops.<op>``, and return what the public function returns."""
    prepare(op.name)
    if backend is not None:
        check_text(backend, "backend=")
    results = getattr(torch.ops.fusedops, op.name).default(*op.prepared(tuple(args)), backend=backend)
    return op.outputs_of(results) if op.required_saved else results


def prepare(name: str) -> None:
    """Make sure that an op and its overloads are registered, and the rules for DTensor once there can be one.

    Warns in an export to ONNX, which ends with torch's error of an op without a translation.
    """
    if name not in _libraries:
        registry.records()  # a plugin's op: plugins are loaded when first needed
    if name not in _libraries:
        raise InvalidInputError(
            f"{name}: got a call of an op that is not registered, expected one of {', '.join(sorted(_libraries))}; to "
            f"fix: call fusedops.register(OP), or return it from the plugin's fusedops_op"
        )
    if name in _with_floats:
        _define_symbolic(name)
    if "torch.distributed.tensor" in modules:
        import fusedops._dispatch.distributed.dtensor as dtensor

        dtensor.register_rules(name)
    if torch.compiler.is_compiling():
        _mark_compiled()
    if is_onnx_export():
        warnings.warn(
            f"{name}: got a call in torch.onnx.export, expected torch's own ops: ONNX has no translation of {name}; to "
            f"fix: call applied.remove() first, where applied is what apply(model) returned, or pass a translation as "
            f"custom_translation_table",
            FusedOpsWarning,
            stacklevel=user_stack_level(),
        )


def _mark_compiled() -> None:
    """Let torch compile again where it holds what was compiled for other registered ops, of another release.

    torch's caches on disk know a compiled backward by the graph of its forward, in which its arguments do not stand.
    """
    config: Any = torch.compiler.config
    if not config.cache_key_tag.endswith(_mark()):
        config.cache_key_tag = config.cache_key_tag.partition(" fusedops ")[0] + _mark()


@cache
def _mark() -> str:
    """Return what tells the registered ops from others. Forgotten when one is defined or removed."""
    return f" fusedops {__version__} {crc32(''.join(f'{name}{each}' for name, each in _schemas.items()).encode()):08x}"


# called while tracing, never traced: the mark of torch.compiler.assume_constant_result, which would load dynamo
prepare._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def register_op(op: Op) -> None:
    """Define the registered ops of an op, forward and backward. Those for floats follow when it is first traced."""
    library = torch.library.Library("fusedops", "FRAGMENT")
    _libraries[op.name] = library
    ready = partial(prepare, op.name)
    forward, backward = ForwardImpl(op), BackwardImpl(op)
    _define(library, op.name, forward_schema(op), forward, ForwardAutograd(op, forward, ready))
    if op.has_gradient:
        schema = backward_schema(op)
        _define(library, f"{op.name}_backward", schema, backward, BackwardAutograd(op, backward, ready))
    if op.float_indices or (op.has_gradient and float_indices(op.backward_types)):
        _with_floats[op.name] = op


def _define_symbolic(name: str) -> None:
    """Define the overloads of an op and of its backward that take floats as tensors."""
    with _lock:
        op = _with_floats.get(name)
        if op is None:  # another thread has
            return
        library, ready = _libraries[name], partial(prepare, name)
        if floats := op.float_indices:
            forward = ForwardImpl(op)
            symbolic = SymbolicFloats(forward, floats)
            autograd = ForwardAutograd(op, forward, ready, symbolic)
            _define(library, f"{name}.symbolic", forward_schema(op, floats), symbolic, autograd)
        if op.has_gradient and (floats := float_indices(op.backward_types)):
            backward = BackwardImpl(op)
            symbolic = SymbolicFloats(backward, floats)
            schema = backward_schema(op, floats)
            autograd = BackwardAutograd(op, backward, ready, symbolic)
            _define(library, f"{name}_backward.symbolic", schema, symbolic, autograd)
        del _with_floats[name]


def unregister_op(op: Op) -> None:
    """Remove the registered ops of an op."""
    library = _libraries.pop(op.name, None)
    if library is not None:
        _with_floats.pop(op.name, None)
        for name in (op.name, f"{op.name}_backward"):
            _schemas.pop(name, None)
        _mark.cache_clear()
        destroy(library)


def _define(
    library: torch.library.Library, name: str, schema: str, impl: Implementations, autograd: Callable[..., Any]
) -> None:
    if name.endswith(".symbolic"):  # its schema follows from the op's
        library.define(f"{name}{schema}")
    else:
        _schemas[name] = schema
        _mark.cache_clear()
        define(library, name, schema)
    implement(library, name, impl.run, "CompositeExplicitAutograd")
    register_fake(library, name, impl.fake)
    implement(library, name, autograd, "Autograd", with_keyset=True)
    implement(library, name, impl.reference, "FuncTorchBatched")

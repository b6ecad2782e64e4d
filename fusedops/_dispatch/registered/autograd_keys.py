"""The kernels of the registered ops for torch's Autograd key: the gradient of each op and of its backward.

torch's autograd of registered ops refuses torch.func.grad, and drops a forward-mode tangent without an error: there,
and under vmap, an op becomes its reference. torch.compile traces through transforms in the same way.

On plain tensors a call goes on here as a plain call does: torch's dispatcher would pass it on unchanged, in 10 us.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.signature import float_indices
from fusedops._dispatch import autograd
from fusedops._dispatch.registered.implementations import BackwardImpl, ForwardImpl, whole_arguments
from fusedops._dispatch.registered.symbolic_floats import SymbolicFloats, as_tensors, has_symbolic_floats
from fusedops._dispatch.serve import serve
from fusedops._policy import context
from fusedops._torch import (
    BelowAutograd,
    after_autograd,
    is_dynamo_compiling,
    is_legacy_batchedtensor,
    is_plain,
    is_transformed,
)

Implementations = ForwardImpl | BackwardImpl | SymbolicFloats


class ForwardAutograd:
    """The Autograd kernel of ``torch.ops.fusedops.<op>``, and of its overload ``symbolic``.

    Args:
        op: the op.
        impl: its implementations.
        prepare: makes sure that the rules for DTensor are registered.
        symbolic: the implementations of the overload ``symbolic``, for its kernel; None for the op's own.
    """

    def __init__(
        self, op: Op, impl: ForwardImpl, prepare: Callable[[], None], symbolic: SymbolicFloats | None = None
    ) -> None:
        self._op, self._impl = op, impl
        self._prepare, self._symbolic = prepare, symbolic
        self._overload = "default" if symbolic is None else "symbolic"
        self._backward = "symbolic" if symbolic is not None and float_indices(op.backward_types) else "default"

    def __call__(self, keys: Any, *args: Any, save: bool = False, backend: str | None = None) -> Any:
        op, impl = self._op, self._impl
        if is_transformed():
            return (self._symbolic or impl).reference(*args, save=save)
        if is_plain(args):
            if self._symbolic is not None:
                args = tuple(self._symbolic.as_floats(args))
            if not op.has_gradient or not _wants_gradient(args):
                return impl.run(*args, save=save, backend=backend)
            args = impl.complete_arguments(args)
            outputs = serve(op, args, backend)
        else:
            self._prepare()
            options = {"backend": backend, "save": save} if op.required_saved else {"backend": backend}
            if self._symbolic is None and has_symbolic_floats(args, op.float_indices):
                args = whole_arguments(op, args)
                return _overload(op.name, "symbolic")(*as_tensors(args, op.float_indices), **options)
            if not op.has_gradient or not _wants_gradient(args):
                return _below_autograd(_overload(op.name, self._overload), keys, args, options)
            args = whole_arguments(op, args)
            forward = partial(self._forward, keys, backend)
            backward = partial(self._run_backward, backend, context.frame.get())
            outputs = autograd.apply(op, forward, backward, False, autograd.unwrapped(args))
        # saved values are differentiable too, for a graph with a gradient in it that is differentiated again
        return impl.as_registered(outputs, args, impl.saved_references(args, outputs) if save else ())

    def _forward(self, keys: Any, backend: str | None, *args: Any) -> Any:
        """Return what a forward kernel returns, by the registered op below autograd."""
        op = self._op
        function = _overload(op.name, self._overload)
        if not op.saved:
            return _below_autograd(function, keys, args, {"backend": backend})
        options = {"backend": backend, "save": True} if op.required_saved else {"backend": backend}
        results = _below_autograd(function, keys, args[:-1], options)
        results = (results,) if isinstance(results, Tensor) else tuple(results)
        saved = iter(results[len(op.outputs) :])
        return (*results[: len(op.outputs)], *[None if value.optional else next(saved) for value in op.saved])

    def _run_backward(self, backend: str | None, block: Any, args: tuple[Any, ...]) -> Any:
        """Call the registered op of backward, by the policy that was in effect in forward."""
        function = _overload(f"{self._op.name}_backward", self._backward)
        if is_dynamo_compiling():  # compiled autograd, which cannot trace the blocks below
            return function(*args, backend=backend)
        # backward may run on another thread, or after `with use(...)` has ended
        with context.within(block):
            grads = args[: len(self._op.with_gradient)]
            if torch.is_grad_enabled() or is_transformed() or any(map(is_legacy_batchedtensor, grads)):
                return function(*args, backend=backend)
            with BelowAutograd():  # the Autograd key would only pass the call on
                return function(*args, backend=backend)


class BackwardAutograd:
    """The Autograd kernel of ``torch.ops.fusedops.<op>_backward``, and of its overload ``symbolic``.

    Args:
        op: the op.
        impl: the implementations of its backward.
        prepare: makes sure that the rules for DTensor are registered.
        symbolic: as for :class:`ForwardAutograd`.
    """

    def __init__(
        self, op: Op, impl: BackwardImpl, prepare: Callable[[], None], symbolic: SymbolicFloats | None = None
    ) -> None:
        self._name, self._impl = f"{op.name}_backward", impl
        self._prepare, self._symbolic = prepare, symbolic
        self._single = len(op.differentiable) == 1
        self._float_indices = float_indices(op.backward_types)
        self._overload = "default" if symbolic is None else "symbolic"

    def __call__(self, keys: Any, *args: Any, backend: str | None = None) -> Any:
        impl = self._symbolic or self._impl
        if is_transformed():
            return impl.reference(*args)
        if is_plain(args):
            compute: Callable[..., Any] = partial(impl.run, backend=backend)
        else:
            self._prepare()
            if self._symbolic is None and has_symbolic_floats(args, self._float_indices):
                return _overload(self._name, "symbolic")(*as_tensors(args, self._float_indices), backend=backend)
            compute = partial(self._below, keys, backend)
        if not _wants_gradient(args):
            return compute(*args)
        numbers = self._float_indices if self._symbolic is not None else ()
        function: Any = BackwardFunction
        return function.apply(compute, impl.reference, self._single, numbers, *args)

    def _below(self, keys: Any, backend: str | None, *args: Any) -> Any:
        return _below_autograd(_overload(self._name, self._overload), keys, args, {"backend": backend})


class BackwardFunction(torch.autograd.Function):
    """The derivative of a registered backward, by its reference: without one it would be wrong silently.

    Its arguments are the function that computes backward; the reference; True where it returns one gradient; where the
    floats that are tensors are, which have no gradient; then the arguments of backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[..., Any],
        reference: Callable[..., Any],
        single: bool,
        numbers: Sequence[int],
        *args: Any,
    ) -> Any:
        ctx.save_for_backward(*(value for value in args if isinstance(value, Tensor)))
        others = [None if isinstance(value, Tensor) else (value,) for value in args]
        ctx.rest = reference, single, numbers, others
        return compute(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        reference, single, numbers, others = ctx.rest
        tensors = iter(ctx.saved_tensors)
        args = [next(tensors) if boxed is None else boxed[0] for boxed in others]
        indices = [index for index, arg in enumerate(args) if isinstance(arg, Tensor) and arg.is_floating_point()]
        indices = [index for index in indices if index not in numbers]

        def gradient(*inputs: Tensor) -> Any:
            changed = list(args)
            for index, value in zip(indices, inputs):
                changed[index] = value
            return reference(*changed)

        pullback = torch.func.vjp(gradient, *(args[index] for index in indices))[1]
        by_index = dict(zip(indices, pullback(grads[0] if single else grads)))
        return None, None, None, None, *(by_index.get(index) for index in range(len(args)))


def _wants_gradient(args: Sequence[Any]) -> bool:
    if torch.is_grad_enabled():
        for arg in args:
            if isinstance(arg, Tensor) and arg.requires_grad:
                return True
    return False


def _overload(name: str, overload: str) -> Any:
    return getattr(getattr(torch.ops.fusedops, name), overload)


def _below_autograd(function: Any, keys: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Call a registered op for the keys after autograd's."""
    with BelowAutograd():
        return function.redispatch(keys & after_autograd, *args, **options)

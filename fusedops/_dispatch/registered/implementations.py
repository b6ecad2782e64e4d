"""Implementations of a registered op: by a backend, on fake tensors, and in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.signature import float_indices, with_floats
from fusedops._dispatch.registered.backward_check import BackwardCheck, has_symbolic_sizes
from fusedops._dispatch.serve import backward_results, forward_results
from fusedops.errors import InvalidInputError


class ForwardImpl:
    """The implementations of ``torch.ops.fusedops.<op>``.

    They return the outputs, then the required saved values: with ``save``, else an empty tensor for each. Only an op
    with required saved values has the parameter ``save``.

    Args:
        op: the op.
    """

    def __init__(self, op: Op) -> None:
        self._op = op

    def run(self, *args: Any, save: bool = False, backend: str | None = None) -> Any:
        """Serve a call. The kernel is selected here, at run time, so that a changed policy is in effect."""
        op, args = self._op, self.complete_arguments(args)
        if op.written:
            forward_results(op, args, backend)
            return None
        if not save:
            outputs = op.outputs_of(forward_results(op, args, backend))
            return self.as_registered(_as_fake(self._ordered(outputs, args)), args)
        # of tensors that require no gradient, so that the kernel computes every saved value, as fake() has them
        args = tuple([arg.detach() if isinstance(arg, Tensor) and arg.requires_grad else arg for arg in args])
        results = forward_results(op, args, backend, True)
        count = len(op.outputs)
        # a traced graph keeps no optional saved values: they may be None
        saved = [value for value, declared in zip(results[count:], op.saved) if not declared.optional]
        outputs = op.as_tuple(self._ordered(op.outputs_of(results), args))
        return _as_fake((*outputs, *saved))

    def fake(self, *args: Any, save: bool = False, backend: str | None = None) -> Any:
        """Return empty results with the shapes, dtypes and strides that a kernel returns."""
        args = self._valid(args)
        if self._op.written:
            return None
        outputs = self._op.empty(*args)
        saved = self.saved_references(args, outputs) if save else []
        return self.as_registered(
            outputs, args, [torch.empty_like(value, memory_format=torch.contiguous_format) for value in saved]
        )

    def reference(self, *args: Any, save: bool = False, backend: str | None = None) -> Any:
        """Compute the op in plain torch, which torch can transform. No backend serves it."""
        args = self._valid(args)
        outputs = self._op.reference(*args)
        if self._op.written:
            return self._op.write(args, outputs)
        return self.as_registered(outputs, args, self.saved_references(args, outputs) if save else [])

    def as_registered(self, outputs: Any, args: Sequence[Any], saved: Sequence[Tensor] = ()) -> Any:
        """Return the results of the registered op: ``outputs`` as the public function has them, and saved values."""
        if not self._op.required_saved:
            return outputs
        nothing = [args[0].new_empty(0) for _ in self._op.required_saved]  # a torch op returns no None
        return (*self._op.as_tuple(outputs), *(saved or nothing))

    def saved_references(self, args: Sequence[Any], outputs: Any) -> list[Tensor]:
        """Return the required saved values by their references, which are differentiable."""
        saved = self._op.saved_references(args, self._op.as_tuple(outputs))
        return [value for value, declared in zip(saved, self._op.saved) if not declared.optional]

    def _ordered(self, outputs: Any, args: Sequence[Any]) -> Any:
        """Return the outputs with the strides of ``fake``, where a kernel may order their dims as it likes."""
        op = self._op
        if not op.permuted:
            return outputs
        likes = op.as_tuple(op.empty(*[_without_memory(arg) if isinstance(arg, Tensor) else arg for arg in args]))
        each = [
            _with_strides(y, like.stride()) if name in op.permuted else y
            for name, y, like in zip(op.outputs, op.as_tuple(outputs), likes)
        ]
        return each[0] if op.single else tuple(each)

    def complete_arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all arguments of a valid call that has what the public function draws."""
        op, args = self._op, self._valid(args)
        if op.prepare_args is not None and op.prepare_args(args) is not args:
            raise InvalidInputError(
                f"{op.name}: got a registered call without what the public function draws, expected every argument; to "
                f"fix: call fusedops.{op.name}, which draws it, or pass it"
            )
        return args

    def _valid(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        args = whole_arguments(self._op, args)
        self._op.validate(args)
        return with_floats(args, self._op.float_indices)


class BackwardImpl:
    """The implementations of ``torch.ops.fusedops.<op>_backward``."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self._check = BackwardCheck(op)
        self._float_indices = float_indices(op.backward_types)

    def run(self, *args: Any, backend: str | None = None) -> Any:
        """Serve a gradient, by the first backend of the order: which backend ran forward is not known."""
        self._check(args)
        # torch passes a bool[] as a list; a tuple, as on the plain route, is what the cpu backend's launcher remembers
        given = with_floats(args, self._float_indices)
        given = tuple([tuple(cast("list[bool]", arg)) if type(arg) is list else arg for arg in given])
        gradients = _without_none(backward_results(self._op, given, backend), args[0])
        # a kernel may order the dims otherwise
        likes = self._like_gradients(args) if self._op.permuted else None
        if isinstance(gradients, Tensor):
            return _as_fake(gradients.contiguous() if likes is None else _in_order_of(likes, gradients))
        if likes is None:
            return _as_fake(tuple([gradient.contiguous() for gradient in gradients]))
        return _as_fake(tuple(map(_in_order_of, likes, gradients)))

    def fake(self, *args: Any, backend: str | None = None) -> Any:
        """Return empty gradients with the shapes, dtypes and strides that a kernel returns."""
        if not has_symbolic_sizes(args):
            self._check(args)
        gradients, order = self._like_gradients(args), torch.contiguous_format
        if gradients is None:
            with torch.no_grad():
                gradients = self.reference(*args)
        elif self._op.permuted:
            order = torch.preserve_format
        if isinstance(gradients, Tensor):
            return torch.empty_like(gradients, memory_format=order)
        return tuple([torch.empty_like(each, memory_format=order) for each in gradients])

    def _like_gradients(self, args: tuple[Any, ...]) -> Any:
        """Return tensors like the gradients where backward takes all that the op differentiates, else None.

        Its reference would give torch.compile hundreds of operations to trace, of symbolic sizes in a graph for any
        length.
        """
        names = self._op.differentiable
        given = dict(zip(self._op.backward_parameters, args))
        if any(name not in given for name in names):
            return None
        if len(names) == 1:
            return given[names[0]]
        wanted = [given[name] if need else None for name, need in zip(names, given["needs"])]
        return _without_none(tuple(wanted), args[0])

    def reference(self, *args: Any, backend: str | None = None) -> Any:
        """Compute the gradients in plain torch. No backend serves them."""
        return _without_none(self._op.backward(*with_floats(args, self._float_indices)), args[0])


def whole_arguments(op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return all arguments: torch leaves out trailing ones that equal the schema's default."""
    return (*args, *op.defaults[len(args) :])


def _without_memory(tensor: Tensor) -> Tensor:
    """Return a tensor on the meta device, with the strides of this one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _in_order_of(like: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient with the strides that torch.empty_like(like) has."""
    if gradient.stride() == like.stride():  # both without gaps
        return gradient
    return _with_strides(gradient, torch.empty_like(like, device="meta").stride())


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a tensor without gaps with the strides of one that has the same shape: itself, a view, or a copy."""
    if tensor.stride() == strides:
        return tensor
    if all(size == 1 or ours == theirs for size, ours, theirs in zip(tensor.shape, tensor.stride(), strides)):
        return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _as_fake(results: Any) -> Any:
    """Return results with the strides of fake ones also for dims of size 1, which a kernel may give any stride."""
    if isinstance(results, tuple):
        return tuple(map(_as_fake, cast("tuple[Any, ...]", results)))
    tensor = cast("Tensor | None", results)
    if tensor is None or 1 not in tensor.shape or not tensor.is_contiguous():
        return tensor
    return tensor.view(-1).view(tensor.shape)


def _without_none(gradients: Any, like: Tensor) -> Any:
    """Return the gradients with an empty tensor for each that was not wanted: a torch op returns no None."""
    if not isinstance(gradients, tuple):
        return gradients
    several = cast("tuple[Tensor | None, ...]", gradients)
    return tuple([like.new_empty(0) if gradient is None else gradient for gradient in several])

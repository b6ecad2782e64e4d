"""The computations of the registered ops: served by a backend, on fake tensors, and in plain torch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.signature import float_places, with_floats
from fusedops._dispatch.backward_check import BackwardCheck, has_symbolic_sizes
from fusedops._dispatch.select import backward_plan, counted_call, plan_for, select
from fusedops.errors import InvalidInputError


class ForwardKernels:
    """The computations of ``torch.ops.fusedops.<op>``, or of ``<op>_with_saved``.

    Args:
        op: the op.
        save: True for ``<op>_with_saved``.
    """

    def __init__(self, op: Op, save: bool) -> None:
        self._op, self._save = op, save

    def run(self, *args: Any, backend: str | None = None) -> Any:
        """Serve a call. The kernel is selected here, at run time, so that a changed policy is in effect."""
        op = self._op
        args = self._validated(args)
        if op.complete is not None and op.complete(args) is not args:
            raise InvalidInputError(
                f"{op.name}: got a registered call without what the public function draws, expected every argument; to "
                f"fix: call fusedops.{op.name}, which draws it, or pass it"
            )
        function = counted_call(select(plan_for(op, args[0], backend), args))
        if not self._save:
            return _as_fake(op.outputs_of(function(*args, False)) if op.saved else function(*args))
        # of tensors that require no gradient, so that the kernel computes every saved value, as fake() has them
        results = function(
            *[arg.detach() if isinstance(arg, Tensor) and arg.requires_grad else arg for arg in args], True
        )
        # a traced graph keeps no optional saved values: they may be None
        count = len(op.outputs)
        saved = [value for value, declared in zip(results[count:], op.saved) if not declared.optional]
        return _as_fake((*results[:count], *saved))

    def fake(self, *args: Any, backend: str | None = None) -> Any:
        """Return empty results with the shapes, dtypes and strides that a kernel returns."""
        args = self._validated(args)
        outputs = self._op.empty(*args)
        if not self._save:
            return outputs
        saved = self._required_saved(args, outputs)
        return (
            *self._op.each(outputs),
            *(torch.empty_like(value, memory_format=torch.contiguous_format) for value in saved),
        )

    def reference(self, *args: Any, backend: str | None = None) -> Any:
        """Compute the op in plain torch, which torch can transform. No backend serves it."""
        args = self._validated(args)
        outputs = self._op.reference(*args)
        return (*self._op.each(outputs), *self._required_saved(args, outputs)) if self._save else outputs

    def _validated(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        args = whole_arguments(self._op, args)
        self._op.validate(args)
        return with_floats(args, self._op.float_places)

    def _required_saved(self, args: tuple[Any, ...], outputs: Any) -> list[Tensor]:
        saved = self._op.saved_references(args, self._op.each(outputs))
        return [value for value, declared in zip(saved, self._op.saved) if not declared.optional]


class BackwardKernels:
    """The computations of ``torch.ops.fusedops.<op>_backward``."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self._check = BackwardCheck(op)
        self._places = float_places(op.backward_types)

    def run(self, *args: Any, backend: str | None = None) -> Any:
        """Serve a gradient, by the first backend of the order: which backend ran forward is not known."""
        self._check(args)
        gradients = _without_none(self.serve(args, backend), args[0])
        if isinstance(gradients, Tensor):
            return _as_fake(gradients.contiguous())
        # a kernel may order the dims otherwise
        return _as_fake(tuple([gradient.contiguous() for gradient in gradients]))

    def serve(self, args: tuple[Any, ...], backend: str | None) -> Any:
        """Return what the kernel returns for a valid call: None for each gradient that is not wanted."""
        # torch passes a bool[] as a list; a tuple, as on the plain route, is what the cpu backend's launcher remembers
        args = tuple([tuple(arg) if type(arg) is list else arg for arg in with_floats(args, self._places)])  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
        plan = plan_for(self._op, args[0], backend)
        after = backward_plan(plan, plan.first.backend if plan.first else "")
        return counted_call(select(after, args))(*args)

    def fake(self, *args: Any, backend: str | None = None) -> Any:
        """Return empty gradients with the shapes, dtypes and strides that a kernel returns."""
        if not has_symbolic_sizes(args):
            self._check(args)
        with torch.no_grad():
            gradients = self.reference(*args)
        if isinstance(gradients, Tensor):
            return torch.empty_like(gradients, memory_format=torch.contiguous_format)
        return tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in gradients)

    def reference(self, *args: Any, backend: str | None = None) -> Any:
        """Compute the gradients in plain torch. No backend serves them."""
        return _without_none(self._op.backward(*with_floats(args, self._places)), args[0])


def whole_arguments(op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return all arguments: torch leaves out trailing ones that equal the schema's default."""
    return (*args, *op.defaults[len(args) :])


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

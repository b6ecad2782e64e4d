"""Padding, ``adapt="pad"``: a call that a kernel refuses for a size that is no multiple is made larger, and cropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from math import lcm
from typing import Any

from fusedops._contract.constraint import Constraint
from fusedops._contract.kernel import Adaptation, Kernel
from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._contract.values import Padding
from fusedops._plugins.record import PreparedKernel
from fusedops._report.reason import Reason
from fusedops.constraints import Dim

Grow = Callable[[Sequence[Any]], "tuple[Any, ...] | None"]


def padded_kernel(op: Op, kernel: PreparedKernel) -> PreparedKernel | None:
    """Return a kernel for the calls that ``kernel`` takes once they are padded, or None where it asks for no multiple.

    Every constraint holds for the padded call: the check gets its sizes.
    """
    grow, padding = _grower(op, kernel.kernel), op.padding
    if grow is None or padding is None:
        return None

    def check(*args: Any) -> Constraint | None:
        specs = op.specs(args)
        return kernel.check(*(grow(specs) or specs))

    def call(*args: Any) -> Any:
        result = kernel.call(*(grow(args) or args))
        for dim in padding.dims:
            result = result.narrow(dim, 0, args[0].shape[dim])
        return result.contiguous()

    def cost(*args: Any) -> int:
        """The padded copies of the tensors, and the result before it is cropped."""
        specs = op.specs(args)
        grown = grow(specs) or specs
        copies = [new for new, old in zip(grown, specs) if isinstance(new, TensorSpec) and new != old]
        return sum(spec.nbytes for spec in (*copies, grown[0]))

    def of_padded_call(inner: Callable[..., int | None]) -> Callable[..., int | None]:
        return lambda *args: inner(*(grow(op.specs(args)) or args))

    sentence = "padded to sizes that the kernel takes, with the added part masked out, and the result cropped"
    adaptations = (
        Adaptation("pad", sentence, cost),
        *(item._replace(cost=of_padded_call(item.cost)) for item in kernel.kernel.adaptations),
    )
    padded = copy(kernel)
    padded.kernel = replace(kernel.kernel, adaptations=adaptations)
    padded.check = check
    padded.call, padded.record = call, None
    padded.unconditional = False
    return padded


def with_padding_fix(op: Op, kernel: Kernel, args: Sequence[Any], reasons: Sequence[Reason]) -> tuple[Reason, ...]:
    """Return the reasons of a refusal; where padding would help, the last one's fix mentions it."""
    grow = _grower(op, kernel)
    grown = grow(op.specs(args)) if grow is not None and reasons else None
    if grown is None:
        return tuple(reasons)
    bound = dict(zip(op.parameters_of(kernel.direction), grown))
    if any(constraint.reasons(bound) for constraint in kernel.constraints):
        return tuple(reasons)
    return (*reasons[:-1], reasons[-1]._replace(fix=f'{reasons[-1].fix}, or allow adapt="pad"'))


def _grower(op: Op, kernel: Kernel) -> Grow | None:
    """Return what pads a call for a kernel; it returns None for a call that padding does not change or cannot help."""
    padding = op.padding
    if padding is None:
        return None
    forward = kernel.direction == "forward"
    # the tensors that have the first parameter's sizes
    names = op.parameters[:1] if forward else (*op.backward_call.grads, *op.outputs)
    dims = [item for item in kernel.constraints if isinstance(item, Dim) and item.name in names]
    steps = [_step(dims, dim) for dim in padding.dims]
    if all(step is None for step in steps):
        return None
    pad = padding.forward if forward else padding.backward
    return lambda args: _grown(args, padding, steps, pad)


def _step(constraints: Sequence[Dim], dim: int) -> tuple[int, int] | None:
    """Return the multiple that a dim's size must be, and its least size; None where any size is accepted."""
    about = [item for item in constraints if dim in item.dims]
    if not any(item.multiple_of for item in about):
        return None
    return lcm(*(item.multiple_of or 1 for item in about)), max(item.at_least or 1 for item in about)


def _grown(
    args: Sequence[Any],
    padding: Padding,
    steps: Sequence[tuple[int, int] | None],
    pad: Callable[[Sequence[Any], tuple[int, ...]], tuple[Any, ...]],
) -> tuple[Any, ...] | None:
    given = tuple(int(args[0].shape[dim]) for dim in padding.dims)
    sizes = tuple(
        size if step is None else -(-max(size, step[1]) // step[0]) * step[0] for size, step in zip(given, steps)
    )
    # an empty tensor is not padded: the whole result would be cropped
    return None if sizes == given or 0 in args[0].shape else pad(args, sizes)

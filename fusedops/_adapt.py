"""What is done to a call so that a kernel takes it: what kernels declare, and ``adapt="pad"``, for any of them.

Padding: a call that a kernel refuses for a size that is no multiple is made larger, run, and its result cropped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any

from fusedops._backend import Kernel
from fusedops._constraint import Constraint, Reason
from fusedops._entry import Entry
from fusedops._op import Op, Padding
from fusedops._spec import TensorSpec
from fusedops.constraints import Dim

Grow = Callable[[Sequence[Any]], "tuple[Any, ...] | None"]


@dataclass(frozen=True)
class Adaptation:
    """What is done to some calls that a kernel takes before its own code sees them, and what it costs.

    Args:
        name: short, for programs.
        sentence: what is done, and how often.
        cost: a function of the call's arguments, in the kernel's order, each tensor real or a ``TensorSpec``: the bytes
            written beside the result, 0 where it is free, None where the call does not need it.
    """

    name: str
    sentence: str
    cost: Callable[..., int | None]


def padded_entry(op: Op, entry: Entry) -> Entry | None:
    """The entry for calls that ``entry`` takes once they are padded, or None where its limits ask for no multiple.

    All limits hold for the padded call: the check looks at its sizes.
    """
    grow, refuses = _grower(op, entry.kernel), entry.check
    if grow is None or refuses is None or op.padding is None:
        return None
    padding = op.padding

    def check(*args: Any) -> Constraint | None:
        specs = op.specs(args)
        return refuses(*(grow(specs) or specs))

    def call(*args: Any) -> Any:
        result = entry.call(*(grow(args) or args))
        for dim in padding.dims:
            result = result.narrow(dim, 0, args[0].shape[dim])
        return result.contiguous()

    def cost(*args: Any) -> int:
        """The padded copies of the tensors, and the result before it is cropped."""
        specs = op.specs(args)
        grown = grow(specs) or specs
        made = [new for new, old in zip(grown, specs) if isinstance(new, TensorSpec) and new != old]
        return sum(_bytes(spec) for spec in (*made, grown[0]))

    def of_padded(inner: Callable[..., int | None]) -> Callable[..., int | None]:
        return lambda *args: inner(*(grow(op.specs(args)) or args))

    sentence = "padded to sizes that the kernel takes, what is added masked out, and the result cropped"
    adaptations = (
        Adaptation("pad", sentence, cost),
        *(replace(item, cost=of_padded(item.cost)) for item in entry.kernel.adaptations),
    )
    padded = copy.copy(entry)
    padded.kernel = replace(entry.kernel, adaptations=adaptations)
    padded.check, padded.call = check, call
    return padded


def offered(op: Op, kernel: Kernel, args: Sequence[Any], reasons: Sequence[Reason]) -> tuple[Reason, ...]:
    """The reasons of a refusal; where padding would do, the fix of the last one says so."""
    grow = _grower(op, kernel)
    grown = grow(op.specs(args)) if grow is not None and reasons else None
    if grown is None:
        return tuple(reasons)
    names = op.parameters if kernel.direction == "forward" else op.backward_parameters
    if any(limit.reasons(dict(zip(names, grown))) for limit in kernel.limits):
        return tuple(reasons)
    return (*reasons[:-1], replace(reasons[-1], fix=f'{reasons[-1].fix}, or allow adapt="pad"'))


def _grower(op: Op, kernel: Kernel) -> Grow | None:
    """What pads a call for a kernel; it gives None for a call that padding does not change or cannot help."""
    padding = op.padding
    if padding is None:
        return None
    forward = kernel.direction == "forward"
    names = op.parameters[:1] if forward else ("grad", "y")  # the tensors of the first parameter's sizes
    limits = [limit for limit in kernel.limits if isinstance(limit, Dim) and limit.name in names]
    steps = [_step(limits, dim) for dim in padding.dims]
    if all(step is None for step in steps):
        return None
    pad = padding.forward if forward else padding.backward
    return lambda args: _grown(args, padding, steps, pad)


def _step(limits: Sequence[Dim], dim: int) -> tuple[int, int] | None:
    """The multiple that a dim's size must be, and its least size; None where any size will do."""
    found = [limit for limit in limits if dim in limit.dims]
    if not any(limit.multiple_of for limit in found):
        return None
    return lcm(*(limit.multiple_of or 1 for limit in found)), max(limit.at_least or 1 for limit in found)


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
    # of an empty tensor there is nothing to pad: all of the result would be cut off
    return None if sizes == given or 0 in args[0].shape else pad(args, sizes)


def _bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * spec.dtype.itemsize

"""The check of constraints: calls just inside each of them are served, and right; calls just outside are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.constraint import Constraint
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._policy.use import use
from fusedops._report.direction import Direction
from fusedops.errors import NoBackendError
from fusedops.testing._calls import Call, followed, in_dtype, tensors
from fusedops.testing._check_calls import run
from fusedops.testing._subject import Subject
from fusedops.testing._trial import Trial

_LARGEST = 2**20  # elements of a tensor; for a larger call inside a constraint only the admission is checked
_COMPARED = 4  # in a brief run, a larger call than so many times the elements is made, and not compared with float64
_Known = list[tuple[type[object], object]]  # the arguments of a call and their types


@dataclass(frozen=True)
class _Edge:
    """A call at the edge of a constraint.

    Attributes:
        label: names it.
        args: what the kernel gets, by its own parameters.
        call: the forward call that gives the kernel these arguments, or None where this machine has none.
        taken: True inside the constraint.
    """

    label: str
    args: Mapping[str, Any]
    call: Call | None
    taken: bool


def constraints(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield, for each constraint, the calls at its boundaries."""
    right: list[_Known] = []
    for constraint in subject.constraints(direction):
        edges = list(_edges(subject, direction, constraint))
        if all(edge.taken for edge in edges) and (edges or not _is_slower_here(subject, direction)):
            yield Trial(constraint.describe(), partial(_check_refuses, constraint, len(edges)))
        for edge in edges:
            outside = partial(_check_outside, subject, direction, constraint, edge)
            inside = partial(_check_inside, subject, direction, constraint, edge, right)
            yield Trial(edge.label, inside if edge.taken else outside)


def _is_slower_here(subject: Subject, direction: Direction) -> bool:
    """Return True where a constraint for speed leaves every call to other kernels, such as one on the processor."""
    args = [subject.arguments_of(call, direction) for _, call in subject.named()]
    return any(all(map(each.reasons, args)) for each in subject.kernels[direction].kernel.for_speed)


def _check_refuses(constraint: Constraint, count: int) -> None:
    raise AssertionError(
        f"got no refusal by the constraint {constraint.describe()!r}, expected one: the op accepts {count} calls at "
        f"its edges, and all are inside; to fix: remove it"
    )


def _check_inside(
    subject: Subject, direction: Direction, constraint: Constraint, edge: _Edge, right: list[_Known]
) -> None:
    """Check a call inside a constraint.

    It is made once for both dtypes of 16 bits: in "calls" every dtype of a tensor meets every other value.

    Args:
        subject: the kernels.
        direction: which of them.
        constraint: the constraint.
        edge: the call.
        right: the calls that were right inside another constraint, which this one is added to.
    """
    refusing = subject.kernels[direction].check(*edge.args.values())
    if refusing is not None:
        raise AssertionError(
            f"got a refusal by {refusing.describe()!r}, whose reasons() are empty, expected the call to be taken: it "
            f"is inside {constraint.describe()!r}"
        )
    if edge.call is None or _largest(edge.call) > _LARGEST:
        return
    values: list[object] = [*edge.call.values()]
    known = [(type(value), _of_bits(value)) for value in values]  # 1, 1.0 and True are equal
    if known in right:  # a call at the edge of several constraints, most often the base
        return
    args = tuple(tensors(subject.op, edge.call).values())
    if subject.brief and _largest(edge.call) > _COMPARED * subject.elements:
        run(subject, direction, args)
    else:  # in a brief run without and with saved values in turn: in "calls" both meet every value of an argument
        saving = (bool(len(right) % 2),) if subject.brief else (False, True)
        subject.assert_right(direction, args, saving=saving)
    right.append(known)


def _of_bits(value: object) -> object:
    """Return a tensor of 16 bits as one of float16."""
    if isinstance(value, TensorSpec) and value.dtype is torch.bfloat16:
        return value.replace(dtype=torch.float16)
    return value


def _largest(call: Call) -> int:
    return max(prod(value.shape) for value in call.values() if isinstance(value, TensorSpec))


def _check_outside(subject: Subject, direction: Direction, constraint: Constraint, edge: _Edge) -> None:
    rule = constraint.describe()
    if subject.kernels[direction].check(*edge.args.values()) is None:
        raise AssertionError(f"got a call taken that is outside the constraint {rule!r}, expected a refusal")
    if not constraint.reasons(edge.args):
        raise AssertionError(f"got a refusal by {rule!r} without a reason, expected one from reasons()")
    if edge.call is None:
        return
    try:
        with use(subject.backend, fallback="raise", adapt="none"), torch.no_grad():
            if direction == "forward":
                subject.public(*map(_without_memory, edge.call.values()))
            else:
                args = subject.arguments_of(edge.call, "backward").values()
                getattr(torch.ops.fusedops, f"{subject.op.name}_backward").default(*map(_without_memory, args))
    except NoBackendError:
        return
    raise AssertionError(f"got a call served that is outside the constraint {rule!r}, expected NoBackendError")


def _without_memory(value: Any) -> Any:
    """Return a tensor of a spec that takes no memory, anything else as it is."""
    if not isinstance(value, TensorSpec):
        return value
    zero: Tensor = torch.zeros((), dtype=value.dtype, device=value.device)
    return zero.expand(value.shape)


def _edges(subject: Subject, direction: Direction, constraint: Constraint) -> Iterator[_Edge]:
    others = [other for other in subject.constraints(direction) if other is not constraint]
    seen: dict[str, bool] = {}
    bases = [("", base) for base in subject.bases(direction)]
    # a constraint may be about another value of an argument, such as a window where the base has none
    changed = (
        (f", {label}", {**base, own.name: value})
        for _, base in bases
        for own in subject.op.constraints
        if own.name in constraint.names
        for label, value in own.examples(base).items()
    )
    for suffix, base in chain(bases, (each for each in changed if all(seen.values()))):
        if suffix and not subject.takes(base, direction):
            continue
        args = subject.arguments_of(base, direction)
        for boundary in constraint.boundaries(args):
            edge = _edge(subject, direction, base, args, boundary.label + suffix, boundary.args, boundary.taken)
            if edge is not None and not edge.taken and not constraint.reasons(edge.args):
                # the other tensors followed, and all fit again: change this one alone
                call = {**base, **{name: boundary.args[name] for name in constraint.names if name in base}}
                refused = subject.allows(call) and constraint.reasons(subject.arguments_of(call, direction))
                edge = _Edge(edge.label, subject.arguments_of(call, direction), call, False) if refused else None
            if edge is None or edge.label in seen:
                continue
            if edge.taken and any(other.reasons(edge.args) for other in others):
                continue  # inside this constraint, and outside another
            seen[edge.label] = edge.taken
            yield edge
    for label, call in subject.named():  # calls that this constraint alone refuses, such as a mask where none is taken
        args = subject.arguments_of(call, direction)
        if constraint.reasons(args) and not any(other.reasons(args) for other in others):
            yield _Edge(label, args, call, taken=False)


def _edge(
    subject: Subject,
    direction: Direction,
    base: Call,
    args: Mapping[str, Any],
    label: str,
    wanted: Mapping[str, Any],
    taken: bool,
) -> _Edge | None:
    """Return the forward call that gives the kernel the ``wanted`` arguments; None where the op accepts none."""
    op, call = subject.op, base
    changed = {name: value for name, value in wanted.items() if value != args[name]}
    if any(_differs_in_capability(value, args[name]) for name, value in changed.items()):
        return _Edge(label, wanted, None, taken)  # for another device than this machine's
    for name, value in changed.items():
        # gradients and outputs follow x, or the parameter without which there is no such output
        of = op.output_of.get(name.removeprefix("grad_"))
        target = name if name in op.parameters else of or op.parameters[0]
        if isinstance(value, TensorSpec) and isinstance(call[target], TensorSpec):
            call = followed(op, call, target, value.shape)
            if name != target and value.dtype != args[name].dtype:
                own = {**call, target: call[target].replace(dtype=value.dtype)}
                call = own if of else in_dtype(call, value.dtype)
    # a tensor that followed another one may be changed itself
    call = {**call, **{name: value for name, value in changed.items() if name in op.parameters}}
    dtypes = {value.dtype for value in changed.values() if isinstance(value, TensorSpec)}
    if not subject.allows(call) and len(dtypes) == 1:
        call = in_dtype(call, *dtypes)  # the op requires one dtype of several tensors
    if not subject.allows(call):
        return None
    actual = subject.arguments_of(call, direction)
    return _Edge(label, actual, call, taken) if all(actual[name] == wanted[name] for name in changed) else None


def _differs_in_capability(value: Any, before: Any) -> bool:
    """Return True where two specs differ in the capability."""
    if not isinstance(value, TensorSpec) or not isinstance(before, TensorSpec):
        return False
    return value.capability != before.capability

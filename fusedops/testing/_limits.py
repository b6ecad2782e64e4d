"""The conformance kit on limits: calls just inside each of them, which are to be served, and just outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

import fusedops
from fusedops._constraint import Constraint
from fusedops._op import Direction
from fusedops._spec import TensorSpec
from fusedops.errors import NoBackendError
from fusedops.testing._calls import tensors
from fusedops.testing._subject import Call, Subject, followed, in_dtype
from fusedops.testing._trial import Trial

_LARGEST = 2**20  # elements; a larger call inside a limit is decided, not run


@dataclass(frozen=True)
class _Edge:
    """A call beside a limit: what the kernel would get, and the forward call that gives it this, where one can."""

    label: str
    given: Mapping[str, Any]
    call: Call | None
    taken: bool


def limits(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """For each limit: every call inside its boundaries is served, and right; every call outside is refused."""
    for limit in subject.limits(direction):
        edges = list(_edges(subject, direction, limit))
        if all(edge.taken for edge in edges):
            yield Trial(limit.describe(), partial(_no_outside, limit, len(edges)))
        for edge in edges:
            check = _inside if edge.taken else _outside
            yield Trial(edge.label, partial(check, subject, direction, limit, edge))


def _no_outside(limit: Constraint, count: int) -> None:
    raise AssertionError(
        f"the limit {limit.describe()!r} refuses nothing: of {count} calls at its edges the op allows none that is "
        f"outside; needs a limit that some call breaks, or none"
    )


def _inside(subject: Subject, direction: Direction, limit: Constraint, edge: _Edge) -> None:
    check = subject.entries[direction].check
    refusing = check(*edge.given.values()) if check else None
    if refusing is not None:
        raise AssertionError(
            f"is refused by {refusing.describe()!r}, whose reasons() are none; {limit.describe()!r} takes it"
        )
    if edge.call is None or prod(edge.call[subject.op.parameters[0]].shape) > _LARGEST:
        return
    subject.holds(direction, tuple(tensors(edge.call).values()))


def _outside(subject: Subject, direction: Direction, limit: Constraint, edge: _Edge) -> None:
    check = subject.entries[direction].check
    if check is None or check(*edge.given.values()) is None:
        raise AssertionError(f"is taken, though the limit says {limit.describe()!r}: it is not enforced")
    if not limit.reasons(edge.given):
        raise AssertionError(f"is refused by {limit.describe()!r} without a reason; needs reasons() to give one")
    if edge.call is None:
        return
    args = [_hollow(value) if isinstance(value, TensorSpec) else value for value in edge.call.values()]
    try:
        with fusedops.use(subject.backend, fallback="raise", adapt="none"), torch.no_grad():
            if direction == "forward":
                subject.public(*args)
            else:
                y = _hollow(subject.given(edge.call, "backward")["grad"])
                backward = subject.op.backward_args(y, y, args, subject.needs(args))
                getattr(torch.ops.fusedops, f"{subject.op.name}_backward").default(*backward)
    except NoBackendError:
        return
    raise AssertionError(f"is served, though the limit says {limit.describe()!r}; needs NoBackendError")


def _hollow(spec: TensorSpec) -> Tensor:
    """A tensor of the spec that takes no memory."""
    return torch.zeros((), dtype=spec.dtype, device=spec.device).expand(spec.shape)


def _edges(subject: Subject, direction: Direction, limit: Constraint) -> Iterator[_Edge]:
    others = [other for other in subject.limits(direction) if other is not limit]
    seen: set[str] = set()
    for base in subject.bases(direction):
        args = subject.given(base, direction)
        for boundary in limit.boundaries(args):
            edge = _edge(subject, direction, base, args, boundary.label, boundary.args, boundary.taken)
            if edge is None or edge.label in seen:
                continue
            if edge.taken and any(other.reasons(edge.given) for other in others):
                continue  # inside this limit, and outside another
            seen.add(edge.label)
            yield edge
    for label, call in subject.named():  # what only this limit refuses, such as a mask where none is taken
        given = subject.given(call, direction)
        if limit.reasons(given) and not any(other.reasons(given) for other in others):
            yield _Edge(label, given, call, taken=False)


def _edge(
    subject: Subject,
    direction: Direction,
    base: Call,
    args: Mapping[str, Any],
    label: str,
    wanted: Mapping[str, Any],
    taken: bool,
) -> _Edge | None:
    """The forward call that gives the kernel the ``wanted`` arguments; None where the op allows no such call."""
    call = base
    changed = {name: value for name, value in wanted.items() if value != args[name]}
    if any(_only_capability(value, args[name]) for name, value in changed.items()):
        return _Edge(label, wanted, None, taken)  # of another device than this machine's: decided, not run
    for name, value in changed.items():
        target = name if name in subject.op.parameters else subject.op.parameters[0]  # grad and y have x's shape
        if isinstance(value, TensorSpec) and isinstance(call[target], TensorSpec):
            call = followed(call, target, value.shape)
            if name != target and value.dtype != args[name].dtype:
                call = in_dtype(call, value.dtype)
    # what followed one changed argument may be another of them
    call = {**call, **{name: value for name, value in changed.items() if name in subject.op.parameters}}
    if not subject.allows(call):
        return None
    given = subject.given(call, direction)
    return _Edge(label, given, call, taken) if all(given[name] == wanted[name] for name in changed) else None


def _only_capability(value: Any, before: Any) -> bool:
    return (
        isinstance(value, TensorSpec)
        and isinstance(before, TensorSpec)
        and value.capability != before.capability
        and replace(value, capability=None) == replace(before, capability=None)
    )

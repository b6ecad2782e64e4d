"""The check of sizes: beside those of a kernel's blocks, and beyond those of its grids and counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.tensor_spec import TensorSpec, on_meta
from fusedops._report.direction import Direction
from fusedops._torch import TorchDispatchMode
from fusedops.testing._calls import Call, followed, is_of_numbers, tensors
from fusedops.testing._in_threads import torch_threads
from fusedops.testing._roles import alignments, classes, offsets
from fusedops.testing._subject import Subject
from fusedops.testing._trial import Trial

_AROUND = (63, 64, 65, 128, 129, 256, 257)  # the sizes of a kernel's blocks, and the sizes beside them
_OF_SCANS = (63, 64, 65, 128, 257)  # a reference computes these one after another
_LENGTHS = (63, 64, 65, 128, 256)
_WINDOWS = ((63, 0), (64, 64), (65, 0), (128, 128), (256, 0))
_MORE_ROWS = 4  # than an argument counts
_NUMBERS = {"tuple[int, int] | None": _WINDOWS, "int | None": _LENGTHS}  # by the type of what counts rows or columns
_LARGE = (2**20 + 3, 2**16 + 1, 2**12 + 3)  # a counter of 16 bits, the dims of a grid, the largest block: one more each
_THREADS = 3  # of torch: neither a divisor of usual sizes nor a power of two
_MOST_WORK: Mapping[Direction, int] = {"forward": 2**22, "backward": 2**20}  # elements that the reference computes
_MOST_OF_OTHERS = 2**24  # where the first tensor has one row
_OF_LOOPS = 2**17  # elements of the arguments, where that is not known
_MOST_STEPS = 2**8  # operations: a reference of more is a loop
_FAST = 2**12  # elements with which the kit is run on a device that is not slow, at least


def sizes(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield sizes beside those of blocks, lengths of what counts rows or columns, and sizes beyond 4,096 to 2^20."""
    yield from around(subject, direction)
    if subject.elements >= _FAST and not subject.brief:
        yield from _large(subject, direction)


def around(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield sizes beside 64, 128 and 256, and such lengths for the arguments that count rows or columns.

    In a brief run every second one of each dim, and the others of the next dim, without and with saved values in turn;
    and two of the lengths: 64, with as many on the other side of a window, and 256.
    """
    op, first = subject.op, subject.op.parameters[0]
    for base in subject.bases(direction)[:1]:
        for number, dim in enumerate(_dims(subject, base)):
            every = _AROUND if dim >= -2 else _OF_SCANS
            for at, size in enumerate(every[number % 2 :: 2] if subject.brief else every):
                call = _sized(subject, base, first, dim, size)
                if subject.takes(call, direction):
                    saving = (bool(at % 2),) if subject.brief else (False, True)
                    check = partial(_check_call, subject, direction, call, saving)
                    yield Trial(f"{first} dim {dim} = {size}", check)
    for name in op.parameters:
        values = _NUMBERS.get(op.types[name], ())
        for value in values[1::3] if subject.brief else values:
            bases = subject.bases(direction)
            calls = [_counted(subject, base, name, value, lengthen) for lengthen in (True, False) for base in bases]
            call = next((call for call in calls if subject.takes(call, direction)), None)
            if call is not None:
                yield Trial(f"{name} = {value}", partial(_check_in_one, subject, direction, call))


def _dims(subject: Subject, base: Call) -> list[int]:
    """Return the dims of the first tensor that vary, from the end."""
    rank = len(base[subject.op.parameters[0]].shape)
    # dims that offsets count in are those of a scan, which a kernel may cut into blocks too
    scanned = [c.dim - rank for c in offsets(subject.op) if c.of is None and c.dim < rank - 2]
    return [*scanned, *range(-min(rank, 2), 0)]


def _sized(subject: Subject, base: Call, name: str, dim: int, size: int) -> Call:
    """Return the call with another size in one dim of a tensor, and 1 in each before the last two that may be 1."""
    sizes = [*base[name].shape]
    if name == subject.op.parameters[0]:
        varying = [each + len(sizes) for each in _dims(subject, base)]
        sizes = [size if at in varying else 1 for at, size in enumerate(sizes)]
    sizes[dim] = size
    return followed(subject.op, base, name, tuple(sizes))


def _counted(subject: Subject, base: Call, name: str, value: int | tuple[int, int], lengthen: bool) -> Call:
    """Return a call of more rows than a number counts; with ``lengthen`` of as many keys, in one sequence."""
    op, first = subject.op, subject.op.parameters[0]
    rows = _MORE_ROWS + (value if isinstance(value, int) else max(value))
    longer = [(first, -2)]
    if lengthen:
        rank = len(base[first].shape)
        floating = [n for n, v in base.items() if is_of_numbers(v)]
        longer = [(c.of or first, c.dim) for c in offsets(op)]
        longer = longer or [(each, -2) for each in floating if len(base[each].shape) == rank]
    call = base
    for tensor, dim in longer:
        if call[tensor] is not None and -len(call[tensor].shape) <= dim < len(call[tensor].shape):
            shape = [*call[tensor].shape]
            shape[dim] = rows
            call = followed(op, call, tensor, tuple(shape))
    one = {c.name: call[c.name].replace(shape=(2,)) for c in offsets(op) if lengthen and call[c.name] is not None}
    # which may hide one side of a window
    aligned = dict.fromkeys(alignments(op), "none") if not isinstance(value, int) and min(value) else {}
    return {**call, **one, **aligned, name: value}


def _check_in_one(subject: Subject, direction: Direction, call: Call) -> None:
    """Check a call whose offsets are those of one group of all rows, where they are of one."""
    real = tensors(subject.op, call)
    for constraint in offsets(subject.op):
        if (ends := real[constraint.name]) is not None and ends.shape == (2,):
            rows = real[constraint.of or subject.op.parameters[0]].shape[constraint.dim]
            real[constraint.name] = torch.tensor([0, rows]).to(ends)
    subject.assert_right(direction, tuple(real.values()))


def _check_call(subject: Subject, direction: Direction, call: Call, saving: Sequence[bool] = (False, True)) -> None:
    subject.assert_right(direction, tuple(tensors(subject.op, call).values()), saving=saving)


# ------------------------------------------------------------------------------------------------- large sizes


def _large(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield the largest size of each dim, of other tensors too, with which the reference is quick, and few others."""
    bases = subject.bases(direction)
    first, given = subject.op.parameters[0], list[Call]()
    of_others = [constraint.name for constraint in (*classes(subject.op), *offsets(subject.op))]
    for name in subject.op.tensors if bases else ():
        if name in of_others:  # they hold indices of rows and classes
            continue
        spec = bases[0].get(name)
        dims = _dims(subject, bases[0]) if name == first else range(-len(getattr(spec, "shape", ())), 0)
        for dim in dims:
            if dim < -2 and direction == "backward":  # of a scan, whose reference is a loop
                continue
            every = _LARGE if direction == "forward" or dim == -1 else _LARGE[1:]
            calls = ((size, call) for size in every for call in _of_size(subject, direction, bases, name, dim, size))
            most = _MOST_OF_OTHERS if name != first else _MOST_WORK["forward" if dim != -1 else direction]
            for size, call in calls:
                if call not in given and _is_quick(subject, call, most):
                    given.append(call)
                    label = f"{name} dim {dim} = {size}, {_THREADS} threads"
                    yield Trial(label, partial(_check_large, subject, direction, call))
                    break


def _of_size(
    subject: Subject, direction: Direction, bases: Sequence[Call], name: str, dim: int, size: int
) -> Iterator[Call]:
    """Yield a call for each base: of that size in one dim of a tensor, of one row or three columns if taken."""
    first = subject.op.parameters[0]
    for base in bases:
        if base[name] is None or len(base[name].shape) < -dim:
            continue
        slim = _slim(subject, base, None if name != first else dim, 1 if size == _LARGE[0] else 3)
        for other in (*slim, base):
            call = _sized(subject, other, name, dim, size)
            alone = name == first or call[first].shape == other[first].shape
            if alone and subject.takes(call, direction):
                yield call
                break


def _slim(subject: Subject, base: Call, dim: int | None, columns: int) -> list[Call]:
    """Return smaller calls: of one row, of few columns where rows vary, of both where the first tensor does not."""
    first = subject.op.parameters[0]
    if len(base[first].shape) < 2:
        return []
    few = _sized(subject, base, first, -1, columns)  # three: a norm of one or two columns has no gradient
    if dim is None:
        return [_sized(subject, few, first, -2, 1)]
    if dim != -1:
        return [few if dim == -2 else _sized(subject, few, first, -2, 1)]
    return [_sized(subject, base, first, -2, rows) for rows in (1, 2)]


def _check_large(subject: Subject, direction: Direction, call: Call) -> None:
    with torch_threads(_THREADS), suppress(MemoryError):  # what a kernel keeps may have the square of a size
        _check_call(subject, direction, call)


class _TooMuchWork(Exception):  # noqa: N818  # it ends a computation, and is no error
    pass


class _Loop(Exception):  # noqa: N818
    pass


class _Work(TorchDispatchMode):
    """Ends a computation that makes too many tensors, or tensors of too many elements."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._elements = self._steps = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self._steps += 1
        self._elements += results.numel() if isinstance(results, Tensor) else 0
        if self._elements > self._most:
            raise _TooMuchWork
        if self._steps > _MOST_STEPS:
            raise _Loop
        return results


def _is_quick(subject: Subject, call: Call, most: int) -> bool:
    """Return True where the reference of a call is: by the sizes of what it computes, of tensors without memory."""
    given = sum(value.numel() for value in call.values() if isinstance(value, TensorSpec))
    if given > most:
        return False
    try:
        with torch.no_grad(), _Work(most):
            subject.op.reference(*(on_meta(value) for value in call.values()))
    except _TooMuchWork:
        return False
    except Exception:  # a loop, or it reads elements, of which a tensor without memory has none: offsets of groups
        return given <= _OF_LOOPS
    return True

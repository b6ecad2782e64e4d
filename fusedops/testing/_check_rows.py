"""The check of a kernel's promise ``rows_independent``: a row's result does not depend on the other rows.

A call of many rows by one thread is compared, bit by bit, with calls of some of its rows: of all sizes, from other
starts, in another order, before rows of zeros and of NaN, at odd addresses, by 3 and 8 threads, beside other calls.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from fusedops._contract.evidence import Case, Rows
from fusedops._policy.use import use
from fusedops._report.direction import Direction
from fusedops.testing._calls import dtype_name, specs, tensors
from fusedops.testing._in_threads import in_threads, torch_threads
from fusedops.testing._rows import (
    Real,
    Results,
    assert_same_rows,
    filled,
    gradients_of,
    moved,
    results,
    some_of,
    taken,
)
from fusedops.testing._subject import Subject
from fusedops.testing._trial import Trial

MOST = 4096  # rows
# beside the widths of vectors, the blocks of kernels and the grains of threads
_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 127, 129, 256, 511, 513, 1000, 1025, 2047, 4095)
_THREADS = (3, 8)
_SMALL = 2**12  # elements below which a device is slow: fewer batches, and no threads
_FEWER = 3  # kinds of rows beside the first get so many times fewer elements


def rows_independent(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield each kind of rows in each dtype, for a kernel that makes the promise."""
    subject.kernels = {each: kernel.for_independent_rows() for each, kernel in subject.kernels.items()}
    kinds = subject.op.evidence.rows
    if not kinds:
        yield Trial("has rows", _no_rows)
    for number, rows in enumerate(kinds):
        for dtype in subject.op.evidence.tolerance:
            most = _most(subject, rows) // (_FEWER if number else 1)
            while most > 1:  # a kernel may be one of few rows
                call = subject.complete(specs(subject.op, Case(rows.name, rows.call(most)), dtype, subject.device))
                if subject.takes(call, direction):
                    check = partial(_check, subject, direction, rows, call, most)
                    yield Trial(f"{most} {rows.name} {dtype_name(dtype)}", check)
                    break
                most //= 2


def _no_rows() -> None:
    raise AssertionError(
        "got a kernel with rows_independent=True, expected an op whose evidence has rows by which it can be checked"
    )


def _most(subject: Subject, rows: Rows) -> int:
    """Return the number of rows whose arguments have about four times the elements of the subject, 4,096 at most."""
    shapes: list[tuple[int, ...]] = [v for n, v in rows.call(64).items() if isinstance(v, tuple) and n in rows.dims]
    sizes = map(math.prod, shapes)
    return min(MOST, max(4 * subject.elements * 64 // max(sizes), 2 * _FEWER))


def _check(subject: Subject, direction: Direction, rows: Rows, call: Real, most: int) -> None:
    real = tensors(subject.op, call)
    with use(subject.backend, fallback="raise", adapt="none", rows="independent"):
        with torch_threads(1):
            outputs = results(subject, rows, real, None)
            grads = gradients_of(rows, real, outputs) if direction == "backward" else None
            want = outputs if grads is None else results(subject, rows, real, grads)
            compare = partial(_compare, subject, rows, real, grads, want)
            step = 1 if real[subject.op.parameters[0]].dtype is torch.float32 else 3
            for index, what in batches(rows, most, 6 if subject.elements < _SMALL else step):
                compare(index, what)
            _compare_changed(subject, rows, real, grads, want, most)
        if subject.elements < _SMALL:
            return
        for threads in _THREADS:
            with torch_threads(threads):
                compare(range(most), f"{threads} threads")
        compare(range(most // 3, most - 1), "8 threads, a part")
        _compare_beside_others(compare, most)


def batches(rows: Rows, most: int, step: int = 1) -> Iterator[tuple[Sequence[int], str]]:
    """Yield rows of a call, and their description; one of ``step`` numbers of rows."""
    for number, count in enumerate([*(count for count in _COUNTS[::step] if count < most), most]):
        left = most - count
        start = (0, left, min(left // 2 | 1, left))[number % 3]
        yield range(start, start + count), f"a batch of {count} of {most} rows, from row {start}"
    if not rows.up_to:
        shuffled = list(range(most))
        random.Random(1).shuffle(shuffled)
        yield shuffled, "all rows in another order"
        yield shuffled[: most // 2 + 1], "half of the rows in another order"


def _compare(
    subject: Subject, rows: Rows, real: Real, grads: Results | None, want: Results, index: Sequence[int], what: str
) -> None:
    some = None if grads is None else some_of(rows, real, grads, index)
    got = results(subject, rows, taken(rows, real, index), some)
    assert_same_rows(rows, real, want, got, index, what, grads is not None)


def _compare_changed(subject: Subject, rows: Rows, real: Real, grads: Results | None, want: Results, most: int) -> None:
    """Compare rows before other rows, and at other addresses."""
    for count in sorted({1, min(7, most - 1), most - 1}):
        index = range(count)
        some = None if grads is None else some_of(rows, real, grads, index)
        for elements in (1, 3):
            got = results(subject, rows, moved(taken(rows, real, index), elements), some)
            what = f"{count} of {most} rows, {elements} elements behind the start of their memory"
            assert_same_rows(rows, real, want, got, index, what, grads is not None)
        others = 0 if rows.up_to else min(5, most - count)
        for value in (0.0, math.nan) if others else ():
            more = [*index, *[0] * others]
            some = None if grads is None else some_of(rows, real, grads, more)
            got = results(subject, rows, filled(rows, taken(rows, real, more), others, value), some)
            what = f"{count} of {most} rows, before {others} rows of {value:g}"
            assert_same_rows(rows, real, want, got, index, what, grads is not None)


def _compare_beside_others(compare: partial[None], most: int) -> None:
    """Compare three batches, each in a thread of its own, at a time."""

    def run(index: Sequence[int]) -> None:
        with use(compare.args[0].backend, fallback="raise", adapt="none", rows="independent"):
            for _ in range(2):
                compare(index, f"{len(index)} of {most} rows, beside other calls")

    parts = (range(most), range(most // 2, most), range(most // 3, most // 3 + 1))
    in_threads(*(partial(run, part) for part in parts))

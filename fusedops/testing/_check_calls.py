"""Checks of calls made pairwise of everything that an op's constraints accept: right, and of no other effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusedops._report.direction import Direction
from fusedops.testing._calls import tensors
from fusedops.testing._check_sizes import around
from fusedops.testing._global_state import check_global_state, global_state
from fusedops.testing._new_memory import filled_memory
from fusedops.testing._observed import same_bits
from fusedops.testing._subject import Subject
from fusedops.testing._trial import Trial
from fusedops.testing._variants import GRADIENTS, Variant, variants

_Each = TypeVar("_Each")
_IN_ORDER = 12  # calls before and after each other, at most
_TWICE = 16  # calls that are made twice, at most, and in memory that is filled


def calls(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield calls in which every two values of two arguments meet: results are within the op's tolerance."""
    for variant in variants(subject, direction):
        yield Trial(variant.label, partial(_check_right, subject, direction, variant), variant.excuse)


def _check_right(subject: Subject, direction: Direction, variant: Variant) -> None:
    args = tuple(variant.tensors(subject.op).values())
    subject.assert_right(direction, args, variant.forms.get(GRADIENTS), (variant.save,))


def memory(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield some of these calls: a result is in memory of its own, which a second call does not write."""
    every = variants(subject, direction)
    for variant in _spread(every, _TWICE // 4 if subject.brief else _TWICE):
        yield Trial(variant.label, partial(_check_memory, subject, direction, variant))


def _check_memory(subject: Subject, direction: Direction, variant: Variant) -> None:
    first = run(subject, direction, tuple(variant.tensors(subject.op).values()))
    before = {name: result.clone() for name, result in first.items()}
    second = run(subject, direction, tuple(variant.tensors(subject.op, seed=1).values()))
    for name, result in first.items():
        if not same_bits(result, before[name]):
            raise AssertionError(f"got {name} written by the next call, expected it unchanged: a buffer is used again")
        if result.numel() and result.data_ptr() == second[name].data_ptr():
            raise AssertionError(f"got {name} of two calls in one memory, expected memory of its own for each")


def written(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield some of these calls, and of other sizes, where new memory holds NaN: no element is left as it was."""
    every = calls(subject, direction), around(subject, direction)
    for trial in (trial for trials in every for trial in _spread([*trials], _TWICE)):
        yield Trial(trial.case, filled_memory()(trial.run), trial.excuse)


def history(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield calls after other calls: a result depends on the arguments alone."""
    every = variants(subject, direction)
    some = _spread(every, _IN_ORDER)
    held: list[tuple[Any, ...]] = []  # no later tensor is at their addresses, by which a kernel may have kept results
    if some:
        yield Trial("in another order", partial(_check_order, subject, direction, some, held), "nondeterministic")
    for variant in every[:1]:
        run_written = partial(_check_written, subject, direction, variant)
        yield Trial("arguments written between calls", run_written, "nondeterministic")


def _spread(every: Sequence[_Each], most: int) -> Sequence[_Each]:
    """Return at most so many of the calls, evenly spread over all of them."""
    return every[:: max(1, -(-len(every) // most))]


def _check_order(subject: Subject, direction: Direction, some: Sequence[Variant], held: list[tuple[Any, ...]]) -> None:
    args = [tuple(variant.tensors(subject.op).values()) for variant in some]
    held += args
    there = [run(subject, direction, each) for each in args]
    back = [run(subject, direction, each) for each in reversed(args)]
    for variant, first, second in zip(some, there, reversed(back)):
        _same(first, second, f"the call with {variant.label} has them where other calls were made before it")


def _check_written(subject: Subject, direction: Direction, variant: Variant) -> None:
    """Write other numbers into the tensors of a call, as ``.data`` does: torch counts no change."""
    real = tensors(subject.op, variant.call)
    args = tuple(real.values())
    run(subject, direction, args)
    for name, other in tensors(subject.op, variant.call, seed=1).items():
        if isinstance(other, Tensor):
            real[name].data.copy_(other)
    got = run(subject, direction, args)
    fresh = run(subject, direction, tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args))
    _same(got, fresh, "the call has them where its tensors had other elements in the call before")


def state(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield calls in a process of another state: the same bits, and no change of it."""
    for base in subject.bases(direction)[:1]:
        variant = Variant(base)
        yield Trial("unchanged", partial(_check_unchanged, subject, direction, variant))
        plain = cache(partial(_copies, subject, direction, variant))
        for name, block in _blocks(torch.device(subject.device).type):
            yield Trial(name, partial(_check_state, subject, direction, variant, block, plain), "nondeterministic")


def _check_unchanged(subject: Subject, direction: Direction, variant: Variant) -> None:
    """Make a call as users do, with grad mode on: where it is off, a kernel that leaves it off changes nothing."""
    call = subject.plain_call(direction, tuple(variant.tensors(subject.op).values()))
    device = subject.device_of_tensors
    with torch.enable_grad():
        before = global_state(device, slow=True)
        call()
        check_global_state(before, device)


def _blocks(device_type: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "inference mode", torch.inference_mode
    yield "default dtype float64", _DefaultDtype
    if torch.amp.is_autocast_available(device_type):
        yield "autocast to bfloat16", partial(torch.autocast, device_type, torch.bfloat16)


class _DefaultDtype:
    """A block in which new tensors are float64 by default."""

    def __enter__(self) -> None:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *exc_info: object) -> None:
        torch.set_default_dtype(self._before)


def _copies(subject: Subject, direction: Direction, variant: Variant) -> dict[str, Tensor]:
    results = run(subject, direction, tuple(variant.tensors(subject.op).values()))
    return {name: result.clone() for name, result in results.items()}


def _check_state(
    subject: Subject, direction: Direction, variant: Variant, block: Any, plain: Callable[[], dict[str, Tensor]]
) -> None:
    expected, args = plain(), tuple(variant.tensors(subject.op).values())
    with block():
        _same(run(subject, direction, args), expected, "the call has them in this state of the process")


def run(subject: Subject, direction: Direction, args: Sequence[Any]) -> dict[str, Tensor]:
    """Return the kernel's results by name, right or wrong; their layout, memory and effects are checked."""
    op = subject.op
    if direction == "backward":
        return {f"the gradient of {name}": g for name, g in subject.gradients(subject.inputs(args), args).items()}
    if not op.saved:
        return dict(zip(map(subject.output_name, op.outputs), subject.forward(args)))
    outputs, saved = subject.forward_with_saved(args)
    present = {f"the saved value {name}": value for name, value in saved.items() if value is not None}
    return {**dict(zip(map(subject.output_name, op.outputs), outputs)), **present}


def _same(got: dict[str, Tensor], expected: dict[str, Tensor], when: str) -> None:
    for name, result in got.items():
        if not same_bits(result, expected[name]):
            raise AssertionError(f"got other bits of {name}, expected the same: {when}")

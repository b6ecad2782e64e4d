"""Checks of calls in situations that change no result: which gradients are wanted, threads, shared tensors."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._dispatch.serve import plan_for, select
from fusedops._policy.use import use
from fusedops._report.direction import Direction
from fusedops._verify.result_form import as_tuple
from fusedops.testing._calls import Call, is_of_numbers, tensors
from fusedops.testing._expected import Expected
from fusedops.testing._in_threads import in_threads, torch_threads
from fusedops.testing._layouts import transposed
from fusedops.testing._observed import same_bits
from fusedops.testing._roles import flags
from fusedops.testing._subject import Subject
from fusedops.testing._trial import Trial

_THREADS = 3  # of torch: neither a divisor of usual sizes nor a power of two
_TIMES = 16  # two calls at a time
_TIMES_IF_SLOW = 4  # on a device that is slow, by the elements with which the kit is run
_FAST = 2**12
_PATIENCE = 60.0  # seconds until the other thread makes its call


# ------------------------------------------------------------------------------------------------ what is wanted


def needs(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield each gradient wanted alone, each pair and all but one; and the gradient of each output alone.

    In a brief run without the pairs, and with all gradients wanted for that of an output alone.
    """
    op = subject.op
    for base in subject.bases(direction)[:1]:
        every = {**base, **dict.fromkeys(flags(op), True)}  # an output may have a gradient only where a flag is True
        every = every if subject.takes(every, direction) else base
        present = [name for name in op.differentiable if base[name] is not None]
        for count in sorted({1, 1 if subject.brief else 2, len(present) - 1}):
            for wanted in combinations(present, count) if 0 < count < len(present) else ():
                label = f"{wanted[0]} alone" if count == 1 else " and ".join(wanted)
                call = base if count == 1 else every
                yield Trial(label, partial(_check_needs, subject, call, wanted, op.with_gradient))
        for name in op.with_gradient if len(op.with_gradient) > 1 else ():
            label = f"the gradient of the output {name} alone"
            yield Trial(label, partial(_check_needs, subject, every, present, (name,)))
            for wanted in present if len(present) > 1 and not subject.brief else ():
                yield Trial(f"{label}, for {wanted} alone", partial(_check_needs, subject, every, (wanted,), (name,)))


def _check_needs(subject: Subject, call: Call, wanted: Sequence[str], outputs: Sequence[str]) -> None:
    """Compare the gradients that are wanted, where these outputs alone have a gradient that is not 0."""
    args = tuple(tensors(subject.op, call).values())
    inputs = subject.inputs(args)
    named = zip(subject.op.with_gradient, inputs.grads)
    grads = tuple(grad if name in outputs else torch.zeros_like(grad) for name, grad in named)
    want = subject.expected(args, grads)
    chosen = tuple(name in wanted for name in subject.op.differentiable)
    subject.assert_gradients(subject.gradients(inputs._replace(grads=grads), args, chosen), want, args)


# --------------------------------------------------------------------------------------- where a call is made


def threads(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield a call from another thread than the main one, with three threads of torch, and two calls at a time."""
    for base in subject.bases(direction)[:1]:
        yield Trial("another thread", partial(_check_thread, subject, direction, base))
        yield Trial("two calls at a time", partial(_check_at_a_time, subject, direction, base), "nondeterministic")


def _check_thread(subject: Subject, direction: Direction, base: Call) -> None:
    args = tuple(tensors(subject.op, base).values())
    subject.assert_right(direction, args)  # whatever a kernel prepares at its first call

    def run() -> None:
        with torch_threads(_THREADS):  # here: OpenMP counts them for each thread that makes calls
            subject.assert_right(direction, args)

    in_threads(run)


def _check_at_a_time(subject: Subject, direction: Direction, base: Call) -> None:
    """Make calls with other elements in two threads: each has the bits that it has alone."""
    every = [tuple(tensors(subject.op, base, seed).values()) for seed in range(2)]
    calls = [subject.plain_call(direction, args) for args in every]
    alone = [call() for call in calls]
    together, count = threading.Barrier(len(calls)), torch.get_num_threads()

    def repeat(call: Callable[[], tuple[Any, ...]], want: tuple[Any, ...]) -> None:
        try:
            with torch_threads(count):  # which MKL counts for each thread that makes calls
                for _ in range(_TIMES if subject.elements >= _FAST else _TIMES_IF_SLOW):
                    together.wait(_PATIENCE)
                    for got, wanted in zip(call(), want):
                        if isinstance(wanted, Tensor) and not same_bits(got, wanted):
                            raise AssertionError(
                                "got other bits of a call beside another call, expected those it has alone"
                            )
        except threading.BrokenBarrierError:  # the other call failed
            return
        except BaseException:
            together.abort()
            raise

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # Python changes threads within a call too
    try:
        in_threads(*(partial(repeat, call, want) for call, want in zip(calls, alone)))
    finally:
        sys.setswitchinterval(interval)


def between(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield a call, the same with other tensors of the same sizes, and the first one again."""
    for base in subject.bases(direction)[:1]:
        yield Trial("other tensors in between", partial(_check_between, subject, direction, base))


def _check_between(subject: Subject, direction: Direction, base: Call) -> None:
    every = [tuple(tensors(subject.op, base, seed).values()) for seed in (0, 1)]
    for args in (every[0], every[1], every[0]):
        subject.assert_right(direction, args)


# ---------------------------------------------------------------------------------------------- recorded calls


def recorded(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield calls that are recorded, and made again for other numbers in the same tensors."""
    for count, base in enumerate(subject.bases(direction)[:2], 1):
        yield Trial(f"call {count}", partial(_check_recorded, subject, base, False))
        yield Trial(f"call {count}, of tensors with other strides", partial(_check_recorded, subject, base, True))


def _check_recorded(subject: Subject, base: Call, strided: bool) -> None:
    op = subject.op
    first, second = (tuple(tensors(op, base, seed).values()) for seed in range(2))
    if strided:
        first = tuple([transposed(each) if isinstance(each, Tensor) else each for each in first])
    with torch.no_grad(), use(subject.backend, fallback="raise", adapt="none"):
        kernel = select(plan_for(op, first[0], None), op.prepared(first))
        given = op.with_copies(op.prepared(first))
        assert kernel.record is not None
        results, again = kernel.record(kernel.kernel.function, *given, *([False] if op.saved else []))
        if again is None:
            return
        for old, new in zip(given, second):
            if isinstance(old, Tensor):
                old.copy_(new)
        copies = op.with_copies(given)
        type(again).joined([again])()
        want = op.call_kernel(kernel.call, copies)
    for got, wanted in zip(*map(as_tuple, (results, want))):
        if isinstance(wanted, Tensor) and not same_bits(got, wanted):
            raise AssertionError("got other bits of a recorded call made again, expected those of a call")


# --------------------------------------------------------------------------------------------- shared tensors


def shares(op: Op) -> bool:
    """Return True for an op with two floating tensors."""
    return len(op.tensors) > 1


def shared(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield one tensor for two arguments, and then two tensors; in a brief run one for all that it can be."""
    for base in subject.bases(direction)[:1]:
        left = [n for n, v in base.items() if is_of_numbers(v)]
        while left:
            first, *others = left
            others = [name for name in others if subject.takes(_as_one(base, first, name), direction)]
            together = subject.brief and subject.takes(_as_one(base, first, *others), direction)
            for names in [(first, *others)] if together and others else [(first, name) for name in others]:
                run = partial(_check_shared, subject, direction, _as_one(base, *names), names)
                yield Trial(" and ".join(names), run)
            left = [name for name in left[1:] if not together or name not in others]


def _as_one(call: Call, *names: str) -> Call:
    return {**call, **dict.fromkeys(names, call[names[0]])}


def _check_shared(subject: Subject, direction: Direction, call: Call, names: Sequence[str]) -> None:
    real = tensors(subject.op, call)
    subject.assert_right(direction, tuple(_as_one(real, *names).values()))
    subject.assert_right(direction, tuple(real.values()))


# --------------------------------------------------------------------------------------------- infinite inputs


def infinite(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield infinities in each floating tensor: gradients where the op's formula and torch's autograd agree on them.

    In a brief run of one sign in each, in turn.
    """
    for base in subject.bases(direction)[:1]:
        present = [name for name in subject.op.differentiable if base[name] is not None]
        for number, name in enumerate(present):
            every = (-math.inf, math.inf)
            for value in every[number % 2 :][:1] if subject.brief else every:
                yield Trial(f"{name} with {value:g}", partial(_check_infinite, subject, base, name, value))


def _check_infinite(subject: Subject, base: Call, name: str, value: float) -> None:
    op, real = subject.op, tensors(subject.op, base)
    flat = real[name].cpu().reshape(-1).clone()
    flat[3::31] = value
    real[name] = flat.view(real[name].shape).to(subject.device)
    args = tuple(real.values())
    answer = subject.answer(args)
    wide = [_wide(arg) for arg in subject.backward_arguments(answer.inputs, args).values()]
    with torch.no_grad():
        by_formula = dict(zip(op.differentiable, _each(op.backward(*wide))))
    limits = dict(answer.want.limits)
    for wanted, autograd in answer.want.gradients.items():
        formula = by_formula.get(wanted)
        if formula is not None:
            limit = limits[f"gradient of {wanted}"].expand(autograd.shape)
            apart = ~(((autograd - formula).abs() <= limit) & autograd.isfinite())
            limits[f"gradient of {wanted}"] = limit.masked_fill(apart, math.inf)
    want = Expected(answer.want.outputs, answer.want.grads, answer.want.gradients, answer.want.saved, limits)
    subject.assert_gradients(subject.gradients(answer.inputs, args), want, args)


def _wide(arg: object) -> object:
    if isinstance(arg, torch.dtype):
        return torch.float64
    if not isinstance(arg, Tensor):
        return arg
    return arg.detach().cpu().double() if arg.is_floating_point() else arg.detach().cpu()


def _each(results: object) -> tuple[Tensor | None, ...]:
    return results if isinstance(results, tuple) else (results,)  # pyright: ignore

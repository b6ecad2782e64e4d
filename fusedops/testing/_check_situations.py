"""Checks of calls in situations that change no result: which gradients are wanted, threads, shared tensors, sizes."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.direction import Direction
from fusedops.testing._calls import Call, followed, tensors
from fusedops.testing._expected import Expected
from fusedops.testing._roles import flags, offsets
from fusedops.testing._subject import Subject
from fusedops.testing._trial import Trial

_AROUND = (63, 64, 65, 127, 128, 129, 255, 256, 257)  # the sizes of a kernel's blocks, and the sizes beside them
_LENGTHS = (63, 64, 65, 128, 256)
_MORE_ROWS = 4  # than an argument counts
_NUMBERS = ("tuple[int, int] | None", "int | None")  # types of an argument that counts rows or columns


# ------------------------------------------------------------------------------------------------ what is wanted


def needs(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield each gradient wanted alone and each pair, and the gradient of each output alone, the others 0."""
    op = subject.op
    for base in subject.bases(direction)[:1]:
        present = [name for name in op.differentiable if base[name] is not None]
        for count in (1, 2):
            for wanted in combinations(present, count) if count < len(present) else ():
                label = f"{wanted[0]} alone" if count == 1 else " and ".join(wanted)
                yield Trial(label, partial(_check_needs, subject, base, wanted))
        every = {**base, **dict.fromkeys(flags(op), True)}  # an output may have a gradient only where a flag is True
        base = every if subject.takes(every, direction) else base
        for name in op.with_gradient if len(op.with_gradient) > 1 else ():
            yield Trial(f"the gradient of the output {name} alone", partial(_check_output, subject, base, name))


def _check_needs(subject: Subject, base: Call, wanted: tuple[str, ...]) -> None:
    args = tuple(tensors(subject.op, base).values())
    answer = subject.answer(args)
    chosen = tuple(name in wanted for name in subject.op.differentiable)
    subject.assert_gradients(subject.gradients(answer.inputs, args, chosen), answer.want, args)


def _check_output(subject: Subject, base: Call, name: str) -> None:
    args = tuple(tensors(subject.op, base).values())
    inputs = subject.inputs(args)
    grads = tuple(g if n == name else torch.zeros_like(g) for n, g in zip(subject.op.with_gradient, inputs.grads))
    want = subject.expected(args, grads)
    subject.assert_gradients(subject.gradients(inputs._replace(grads=grads), args), want, args)


# --------------------------------------------------------------------------------------- where a call is made


def threads(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield a call from another thread than the main one."""
    for base in subject.bases(direction)[:1]:
        yield Trial("another thread", partial(_check_thread, subject, direction, base))


def _check_thread(subject: Subject, direction: Direction, base: Call) -> None:
    args = tuple(tensors(subject.op, base).values())
    subject.assert_right(direction, args)  # whatever a kernel prepares at its first call
    raised: list[BaseException] = []

    def run() -> None:
        try:
            subject.assert_right(direction, args)
        except BaseException as error:  # raised again in the thread of the check
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def between(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield a call, the same with other tensors of the same sizes, and the first one again."""
    for base in subject.bases(direction)[:1]:
        yield Trial("other tensors in between", partial(_check_between, subject, direction, base))


def _check_between(subject: Subject, direction: Direction, base: Call) -> None:
    every = [tuple(tensors(subject.op, base, seed).values()) for seed in (0, 1)]
    for args in (every[0], every[1], every[0]):
        subject.assert_right(direction, args)


# --------------------------------------------------------------------------------------------- shared tensors


def shares(op: Op) -> bool:
    """Return True for an op with two floating tensors."""
    return len(op.tensors) > 1


def shared(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield one tensor for two arguments, and then two tensors."""
    for base in subject.bases(direction)[:1]:
        floating = [n for n, v in base.items() if isinstance(v, TensorSpec) and v.is_floating_point()]
        for first, second in combinations(floating, 2):
            call = {**base, second: base[first]}
            if subject.takes(call, direction):
                yield Trial(f"{first} and {second}", partial(_check_shared, subject, direction, call, first, second))


def _check_shared(subject: Subject, direction: Direction, call: Call, first: str, second: str) -> None:
    real = tensors(subject.op, call)
    subject.assert_right(direction, tuple({**real, second: real[first]}.values()))
    subject.assert_right(direction, tuple(real.values()))


# ------------------------------------------------------------------------------------------------------- sizes


def sizes(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield sizes beside 64, 128 and 256, and such lengths for the arguments that count rows or columns.

    In a brief run every second one of each dim, and the others of the next dim.
    """
    op, first = subject.op, subject.op.parameters[0]
    for base in subject.bases(direction)[:1]:
        shape: tuple[int, ...] = base[first].shape
        last = shape[-2:]
        # dims that offsets count in are those of a scan, which a kernel may cut into blocks too
        scanned = [c.dim - len(shape) for c in offsets(op) if c.of is None and c.dim < len(shape) - len(last)]
        for number, dim in enumerate((*scanned, *range(-len(last), 0))):
            for size in _AROUND[number % 2 :: 2] if subject.brief else _AROUND:
                sizes = [*(1,) * (len(shape) - len(last)), *last]
                sizes[dim] = size
                call = followed(op, base, first, tuple(sizes))
                if subject.takes(call, direction):
                    yield Trial(f"{first} dim {dim} = {size}", partial(_check_call, subject, direction, call))
    for name in op.parameters:
        if op.types[name] in _NUMBERS:
            for length in _LENGTHS:
                value = (length, 0) if op.types[name].startswith("tuple") else length
                calls = (_counted(subject, base, name, value, length) for base in subject.bases(direction))
                call = next((call for call in calls if subject.takes(call, direction)), None)
                if call is not None:
                    yield Trial(f"{name} = {value}", partial(_check_call, subject, direction, call))


def _counted(subject: Subject, base: Call, name: str, value: object, length: int) -> Call:
    """Return a call of more rows than a number of rows counts."""
    first = subject.op.parameters[0]
    shape: tuple[int, ...] = base[first].shape
    return {**followed(subject.op, base, first, (*shape[:-2], length + _MORE_ROWS, *shape[-1:])), name: value}


def _check_call(subject: Subject, direction: Direction, call: Call) -> None:
    subject.assert_right(direction, tuple(tensors(subject.op, call).values()))


# --------------------------------------------------------------------------------------------- infinite inputs


def infinite(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield infinities in each floating tensor: gradients where the op's formula and torch's autograd agree on them."""
    for base in subject.bases(direction)[:1]:
        for name in subject.op.differentiable:
            if base[name] is None:
                continue
            for value in (-math.inf, math.inf):
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

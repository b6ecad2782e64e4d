"""The check of saved values: forward's are their references', and backward takes those of any forward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from fusedops._contract.op import Op
from fusedops._report.direction import Direction
from fusedops.testing._calls import Call, dtype_name, in_dtype, tensors
from fusedops.testing._subject import Subject
from fusedops.testing._trial import Trial


def saved(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield every dtype, with and without a gradient wanted; for backward with and without each optional value.

    In a brief run one dtype without a gradient wanted; and for backward, which other checks call in each, one in turn.
    """
    for base in subject.bases(direction)[:1]:
        every = [(dtype, in_dtype(base, dtype)) for dtype in subject.op.evidence.tolerance]
        taken = [(dtype, call) for dtype, call in every if subject.takes(call, direction)]
        for number, (dtype, call) in enumerate(taken):
            if direction == "forward":
                yield Trial(f"{dtype_name(dtype)}, saved", partial(_check_forward, subject, call))
                if not (subject.brief and number):
                    yield Trial(f"{dtype_name(dtype)}, not saved", partial(_check_not_saved, subject, call))
                continue
            choices = _absent(subject.op)
            for absent in choices[len(taken) - 1 - number :: len(taken)] if subject.brief else choices:
                label = f", {' and '.join(absent)} None" if absent else ""
                yield Trial(f"{dtype_name(dtype)}{label}", partial(_check_backward, subject, call, absent))


def _absent(op: Op) -> list[tuple[str, ...]]:
    """Return every choice of optional saved values, to be left out."""
    optional = [value.name for value in op.saved if value.optional]
    choices = product((False, True), repeat=len(optional))
    return [tuple(name for name, leave_out in zip(optional, choice) if leave_out) for choice in choices]


def _check_forward(subject: Subject, call: Call) -> None:
    args = tuple(tensors(subject.op, call).values())
    _, values = subject.forward_with_saved(args)
    subject.assert_saved(values, subject.expected_forward(args), args)


def _check_not_saved(subject: Subject, call: Call) -> None:
    op, args = subject.op, tuple(tensors(subject.op, call).values())
    with torch.no_grad(), subject.alone({"forward": 1}, dict(zip(op.parameters, args))):
        values = subject.run_kernel(args, save=False)[len(op.outputs) :]
    computed = [declared.name for declared, value in zip(op.saved, values) if value is not None]
    if computed:
        raise AssertionError(f"got {' and '.join(computed)} with save = False, expected None: no gradient is wanted")


def _check_backward(subject: Subject, call: Call, absent: tuple[str, ...]) -> None:
    args = tuple(tensors(subject.op, call).values())
    answer = subject.answer(args)
    values = tuple(None if s.name in absent else value for s, value in zip(subject.op.saved, answer.inputs.saved))
    inputs = answer.inputs._replace(saved=values)
    subject.assert_gradients(subject.gradients(inputs, args), answer.want, args)

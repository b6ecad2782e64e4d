"""Checks of the kernels that need no special values: one function for each check, which yields its cases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from fusedops._report.direction import Direction
from fusedops.testing._calls import Call, followed, in_dtype, is_of_numbers, tensors
from fusedops.testing._layouts import Form, cut, expanded, transposed
from fusedops.testing._subject import Subject
from fusedops.testing._trial import Trial

_LONG = 17  # times the rows of the smallest call: more than one block of a kernel has
_SAVING = (True,)  # in "calls" each dtype and layout of each tensor meets the call without saved values


def kernel(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield one case: there is a kernel, and it takes a call; and the form of results, where no other check sees it."""

    def check_kernel() -> None:
        if direction not in subject.kernels:
            raise AssertionError(
                "got no backward kernel, expected one: another backend serves the gradient of what this one computes; "
                'to fix: write one, or declare Deviation("no-backward", ...) at the forward kernel'
            )
        if not subject.bases(direction):
            raise AssertionError("got constraints that refuse the op's named cases in every dtype, at every size tried")

    yield Trial("takes a call", check_kernel, "no-backward")
    op = subject.op
    seen = subject.brief and (direction == "backward" or op.single or op.saved)
    for base in subject.bases(direction)[:1] if direction in subject.kernels and not seen else ():
        yield Trial("the form of its results", partial(_check_form, subject, direction, base))


def _check_form(subject: Subject, direction: Direction, call: Call) -> None:
    subject.check_forms(tuple(tensors(subject.op, call).values()), (direction,))


def results_of(subject: Subject, direction: Direction, call: Call) -> list[Tensor]:
    """Return the kernel's results, right or wrong, and check their layout and that no input is written."""
    args = tuple(tensors(subject.op, call).values())
    if direction == "backward":
        return [*subject.gradients(subject.inputs(args), args).values()]
    if not subject.op.saved:
        return [*subject.forward(args)]
    outputs, saved = subject.forward_with_saved(args)
    return [*outputs, *(value for value in saved.values() if value is not None)]


def dtypes(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield one case for each tensor, in bfloat16 beside others in float32: each result has its own dtype.

    In a brief run some in bfloat16 in each case, and any two in two dtypes in one of them.
    """
    for base in subject.bases(direction)[:1]:
        floating = [name for name, value in base.items() if is_of_numbers(value)]
        alone = {name: trial for name in floating for trial in _narrow(subject, direction, base, name)}
        for bit in range(len(alone).bit_length()) if subject.brief else ():
            names = [name for number, name in enumerate(alone, 1) if number >> bit & 1]
            yield from _narrow(subject, direction, base, *names) or [alone[name] for name in names]
        yield from () if subject.brief else alone.values()


def _narrow(subject: Subject, direction: Direction, base: Call, *names: str) -> list[Trial]:
    """Return the case of tensors in bfloat16, where the kernel takes it and the output is float32 by the others."""
    wide = in_dtype(base, torch.float32)
    call = {**wide, **{name: wide[name].replace(dtype=torch.bfloat16) for name in names}}
    if subject.output_dtype(call) != torch.float32 or not subject.takes(call, direction):
        return []
    return [Trial(f"{' and '.join(names)} bfloat16", partial(_check_call, subject, direction, call, _SAVING))]


def _check_call(subject: Subject, direction: Direction, call: Call, saving: Sequence[bool] = (False, True)) -> None:
    subject.assert_right(direction, tuple(tensors(subject.op, call).values()), saving=saving)


def strides(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield transposed tensors, ones cut out of a wider one, and expanded ones, as inputs and as gradients.

    In a brief run the gradients of expanded inputs are those of sum().
    """
    for base in subject.bases(direction)[:1]:
        for form in (transposed, cut, expanded):
            of_gradients = _of_sum if subject.brief and form is expanded else form
            yield Trial(form.__name__, partial(_check_strides, subject, direction, base, form, of_gradients))
        if direction == "backward" and not subject.brief:
            yield Trial("gradient of sum()", partial(_check_strides, subject, direction, base, _plain, _of_sum))


def _of_sum(gradient: Tensor) -> Tensor:
    return gradient.new_ones(()).expand(gradient.shape)


def _plain(tensor: Tensor) -> Tensor:
    return tensor


def _check_strides(subject: Subject, direction: Direction, base: Call, form: Form, of_gradients: Form) -> None:
    subject.assert_right(direction, in_form(tensors(subject.op, base), form), of_gradients, _SAVING)


def in_form(call: Call, form: Form) -> tuple[object, ...]:
    """Return a call's arguments with each tensor of two dimensions or more in other strides."""
    return tuple(form(value) if isinstance(value, Tensor) and value.dim() > 1 else value for value in call.values())


def empty(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield calls without rows, without columns and without a batch."""
    first = subject.op.parameters[0]
    for base in subject.bases(direction)[:1]:
        shape: tuple[int, ...] = base[first].shape
        for dim in range(len(shape)):
            call = followed(subject.op, base, first, (*shape[:dim], 0, *shape[dim + 1 :]))
            if subject.takes(call, direction):
                yield Trial(f"{first} dim {dim - len(shape)} = 0", partial(_check_call, subject, direction, call))


def determinism(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield one case: three runs give the same bits."""
    first = subject.op.parameters[0]
    for base in subject.bases(direction)[:1]:
        shape: tuple[int, ...] = base[first].shape
        long = followed(subject.op, base, first, (_LONG * shape[0], *shape[1:]))
        call = long if subject.takes(long, direction) else base
        yield Trial("three runs", partial(_check_determinism, subject, direction, call), "nondeterministic")


def _check_determinism(subject: Subject, direction: Direction, call: Call) -> None:
    first_run, *others = [results_of(subject, direction, call) for _ in range(3)]
    for other_run in others:
        for first, second in zip(first_run, other_run):
            differ = (first != second) & ((first == first) | (second == second))  # not where both are NaN
            count = int(differ.sum())
            if count:
                raise AssertionError(
                    f"got two runs that differ in {count} of {first.numel()} elements of "
                    f"{_result_names(subject, direction)}, expected the same bits"
                )


def _result_names(subject: Subject, direction: Direction) -> str:
    op = subject.op
    if direction == "backward":
        return f"the gradients of {' and '.join(op.differentiable)}"
    return "the output" if op.single and not op.saved else " and ".join((*op.outputs, *(s.name for s in op.saved)))

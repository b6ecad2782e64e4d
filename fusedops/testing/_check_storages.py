"""Checks of the memory below tensors: a freed storage, and saved tensors that have other memory by backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._dispatch.serve import backward_plan, plan_for, select
from fusedops._policy.use import use
from fusedops._report.direction import Direction
from fusedops._storages import is_freed
from fusedops.errors import InvalidInputError
from fusedops.testing._calls import Call, tensors
from fusedops.testing._subject import Subject
from fusedops.testing._trial import Trial

# ------------------------------------------------------------------------------------------------------- freed


def freed(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield each tensor that the kernel gets, optional ones and seeds too, with a storage that was freed."""
    for base in subject.bases(direction)[:1]:
        for name, value in subject.arguments_of(base, direction).items():
            if hasattr(value, "shape") and value.numel():
                yield Trial(name, partial(_check_freed, subject, direction, base, name))


def _check_freed(subject: Subject, direction: Direction, base: Call, name: str) -> None:
    args = tuple(tensors(subject.op, base).values())
    if direction == "forward":
        call, function = dict(zip(subject.op.parameters, args)), subject.public
    else:
        call, function = subject.backward_arguments(subject.inputs(args), args), partial(_backward, subject)
    call[name] = call[name].clone(memory_format=torch.preserve_format)
    try:
        call[name].untyped_storage().resize_(0)
    except (NotImplementedError, RuntimeError):  # a device whose storages cannot be freed
        return
    if not is_freed(call[name]):
        return
    what = f"{name} whose storage was freed"
    if direction == "forward":
        _assert_refused(subject, what, lambda: function(*call.values()))
        return
    try:
        _assert_refused(subject, what, lambda: function(*call.values()))
    except _ServedError as error:  # a gradient need not read all that it gets: that of a bias reads no bias
        single = isinstance(error.results, Tensor)
        results = cast("tuple[Any, ...]", (error.results,) if single else error.results)
        named = zip(subject.op.differentiable, results, subject.needs(args))
        gradients = {each: gradient for each, gradient, need in named if need}
        try:
            subject.assert_gradients(gradients, subject.answer(args).want, args)
        except AssertionError:
            raise error from None


class _ServedError(AssertionError):
    """A call that must be refused has results."""

    def __init__(self, text: str, results: Any) -> None:
        super().__init__(text)
        self.results = results


def _backward(subject: Subject, *given: Any) -> Any:
    plan = backward_plan(plan_for(subject.op, given[0], None), subject.backend)
    return select(plan, given).run(given)


def _assert_refused(subject: Subject, what: str, call: Callable[[], Any]) -> None:
    try:
        with use(subject.backend, fallback="raise", adapt="none"):
            results = call()
    except InvalidInputError:
        return
    except Exception as error:
        raise AssertionError(f"got {type(error).__name__} for {what}, expected InvalidInputError") from error
    raise _ServedError(f"got a result for {what}, expected InvalidInputError", results)


# ----------------------------------------------------------------------------------------------------- swapped


def swapped(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield saved tensors that get other memory by ``x.data = other`` before backward, of any sizes."""
    for base in [call for call in subject.bases("forward") if subject.takes(call, "backward")][:1]:
        yield Trial("other memory of the same sizes", partial(_check_other_memory, subject, base))
        for name in _kept(subject, base):
            yield Trial(f"{name} of other sizes", partial(_check_other_sizes, subject, base, name))


def _kept(subject: Subject, base: Call) -> list[str]:
    """Return the arguments that backward takes and that have elements."""
    names = subject.op.backward_call.kept_tensors
    return [name for name in names if base.get(name) is not None and base[name].numel() > 1]


def _graph(subject: Subject, base: Call, args: dict[str, Any]) -> tuple[Tensor, ...]:
    """Make the arguments that have gradients require them, and return the outputs that have one."""
    for name in (*subject.op.differentiable, subject.op.passed_through):
        if name is not None and args[name] is not None:
            args[name].requires_grad_()
    outputs = subject.each_output(subject.public(*args.values()), tuple(args.values()))
    return outputs[: len(subject.op.with_gradient)]


def _check_other_memory(subject: Subject, base: Call) -> None:
    args = tensors(subject.op, base)
    want, (grads, _, _) = subject.answer(tuple(args.values()))
    wanted = [args[name] for name in want.gradients]
    with subject.naming_forms(tuple(args.values())), use(subject.backend, fallback="raise", adapt="none"):
        outputs = _graph(subject, base, args)
        differentiate = partial(torch.autograd.grad, outputs, wanted, grads)
        for name in _kept(subject, base):
            differentiate(retain_graph=True)  # what a kernel remembers of a call
            old = args[name].data  # not detach(), whose changes are new versions of the saved tensor
            args[name].data = old.mT.clone(memory_format=torch.contiguous_format).mT if old.dim() > 1 else old.clone()
            old.fill_(torch.nan if old.is_floating_point() else 0)
        gradients = differentiate()
    subject.assert_gradients(dict(zip(want.gradients, gradients)), want, tuple(args.values()))


def _check_other_sizes(subject: Subject, base: Call, name: str) -> None:
    args = tensors(subject.op, base)
    with use(subject.backend, fallback="raise", adapt="none"):
        outputs = _graph(subject, base, args)
    args[name].data = args[name].data.flatten()[:1].clone()
    _assert_refused(subject, f"{name} of other sizes than in forward", partial(_differentiate, outputs, args, subject))


def _differentiate(outputs: Sequence[Tensor], args: dict[str, Any], subject: Subject) -> None:
    wanted = [args[name] for name in subject.op.differentiable if args[name] is not None]
    torch.autograd.grad(outputs, wanted, [torch.ones_like(y) for y in outputs], allow_unused=True)

"""Checks of the kernels through torch: autograd, checkpoints, compiled code, fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    checkpoint as torch_checkpoint,  # pyright: ignore[reportUnknownVariableType]
)

from fusedops._policy.use import checkpoint_contexts, use
from fusedops._report.direction import Direction
from fusedops._torch import fake_tensor_mode, reset_dynamo
from fusedops._verify.compare import with_choice
from fusedops.testing._calls import Call, dtype_name, in_dtype, tensors
from fusedops.testing._check_forms import in_form
from fusedops.testing._layouts import Form, transposed
from fusedops.testing._observed import check_layout
from fusedops.testing._subject import Subject
from fusedops.testing._trial import Trial

Public = Callable[..., Any]
Way = Callable[[Public, Sequence[Any]], Any]  # calls the public function, such as within a checkpoint


def fake(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield layouts in which the registered op of fake tensors has the shapes, dtypes and strides of the kernel's."""
    for base in subject.bases(direction)[:1]:
        yield Trial("contiguous", partial(_check_fake, subject, direction, base, torch.Tensor.contiguous))
        yield Trial("transposed", partial(_check_fake, subject, direction, base, transposed))
        narrow = in_dtype(base, torch.bfloat16)
        if subject.takes(narrow, direction):
            yield Trial("bfloat16", partial(_check_fake, subject, direction, narrow, torch.Tensor.contiguous))


def _check_fake(subject: Subject, direction: Direction, call: Call, form: Form) -> None:
    given = in_form(tensors(subject.op, call), form)
    with subject.naming_forms(given, (direction,)):
        _check_fake_results(subject, direction, given, form)


def _check_fake_results(subject: Subject, direction: Direction, given: Sequence[Any], form: Form) -> None:
    for function, bound, options, results in _registered(subject, direction, given, form):
        with torch.no_grad(), subject.alone({direction: 1}, bound):
            real = _each(function(*subject.op.with_copies(list(bound.values())), **options))
        with fake_tensor_mode() as mode, torch.no_grad():
            fake_args = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in bound.values()]
            predicted = _each(function(*fake_args, **options))
        for what, got, expected in zip(results, real, predicted):
            if (got.shape, got.dtype) != (expected.shape, expected.dtype):
                check_layout(got, what, expected, subject.device_of_tensors, permuted=direction == "backward")
            if _layout(got) != _layout(expected):
                raise AssertionError(
                    f"got {what} as {_layout(got)}, expected {_layout(expected)}, the fake tensor's, by which code is "
                    f"compiled"
                )


def _registered(
    subject: Subject, direction: Direction, args: Sequence[Any], form: Form | None = None
) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any], list[str]]]:
    """Yield the calls of the registered op of one direction: the op, its arguments, its options, its results' names."""
    op, registered = subject.op, torch.ops.fusedops
    if direction == "backward":
        bound = subject.backward_arguments(subject.inputs(args, form), args)
        names = [f"the gradient of {name}" for name in op.differentiable]
        yield getattr(registered, f"{op.name}_backward").default, bound, {}, names
        return
    bound = dict(zip(op.parameters, args))
    outputs = [subject.output_name(name) for name in op.outputs]
    function = getattr(registered, op.name).default
    yield function, bound, {}, outputs
    if op.required_saved:
        saved = [f"the saved value {value.name}" for value in op.required_saved]
        yield function, bound, {"save": True}, [*outputs, *saved]


def _each(results: Any) -> tuple[Tensor, ...]:
    """Return the results of a registered op, one tensor, several or none, as a tuple."""
    if results is None:
        return ()
    return (results,) if isinstance(results, Tensor) else tuple(cast("Sequence[Tensor]", results))


def _layout(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)} with strides {tuple(tensor.stride())}"


def autograd(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield the public function under autograd, in every dtype: the backend serves both directions.

    In a brief run in the last one that it takes.
    """
    for base in _both(subject):
        every = [(dtype, in_dtype(base, dtype)) for dtype in subject.op.evidence.tolerance]
        taken = [each for each in every if subject.takes(each[1], "forward") and subject.takes(each[1], "backward")]
        for dtype, call in taken[-1:] if subject.brief else taken:
            yield Trial(dtype_name(dtype), partial(_check_gradients, subject, call, 1, _direct))


def checkpoint(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield an activation checkpoint: forward runs again, by the same backend, where backward takes a tensor of it."""
    for base in _both(subject):
        real = tensors(subject.op, base)
        kept = [name for name in subject.op.backward_call.kept_tensors if real.get(name, name) is not None]
        yield Trial("non-reentrant", partial(_check_gradients, subject, base, 2 if kept else 1, _checkpointed))


def compile_(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield code compiled by torch.compile(fullgraph=True), whose sizes are symbols."""
    for base in _both(subject):
        yield Trial("fullgraph", partial(_check_compiled, subject, base))


def _check_compiled(subject: Subject, base: Call) -> None:
    try:
        _check_gradients(subject, base, 1, _compiled)
    finally:
        reset_dynamo()


def _both(subject: Subject) -> list[Call]:
    return [call for call in subject.bases("forward") if subject.takes(call, "backward")][:1]


def _direct(public: Public, args: Sequence[Any]) -> Any:
    return public(*args)


def _checkpointed(public: Public, args: Sequence[Any]) -> Any:
    run = cast("Callable[..., Any]", torch_checkpoint)
    return run(public, *args, use_reentrant=False, context_fn=checkpoint_contexts)


def _compiled(public: Public, args: Sequence[Any]) -> Any:
    return torch.compile(lambda *values: public(*values), fullgraph=True, dynamic=True, backend="aot_eager")(*args)


def _check_gradients(subject: Subject, call: Call, forwards: int, way: Way) -> None:
    real = tensors(subject.op, call)
    with subject.naming_forms(tuple(real.values())):
        _check_results(subject, real, forwards, way)


def _check_results(subject: Subject, real: dict[str, Any], forwards: int, way: Way) -> None:
    op = subject.op
    want, (grads, _, _) = subject.answer(tuple(real.values()))
    for name in want.gradients:
        real[name] = real[name].requires_grad_()
    args = tuple(real.values())
    unchanged = {**real, **dict(zip(op.backward_call.grads, grads))}
    with subject.alone({"forward": forwards, "backward": 1}, unchanged):
        outputs = subject.each_output(way(subject.public, args), args)
        with_gradient = outputs[: len(op.with_gradient)]
        gradients = torch.autograd.grad(with_gradient, [real[name] for name in want.gradients], grads)
    if any(y.requires_grad for y in outputs[len(op.with_gradient) :]):
        raise AssertionError(f"got {' and '.join(op.integers)} with a gradient, expected none: integers have none")
    subject.check_outputs(outputs, args)
    if op.evidence.pin_choice is not None:
        want = subject.expected(with_choice(op, args, outputs), grads)
    subject.assert_outputs(outputs, want, args)
    subject.assert_gradients(dict(zip(want.gradients, gradients)), want, args)


def opcheck(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield torch.library.opcheck of the registered ops."""
    for base in _both(subject):
        yield Trial("forward", partial(_check_opcheck, subject, base, "forward"))
        yield Trial("backward", partial(_check_opcheck, subject, base, "backward"))


def _check_opcheck(subject: Subject, base: Call, direction: Direction) -> None:
    utils = ["test_schema", "test_faketensor"]
    differentiable = torch.device(subject.device).type in ("cpu", "cuda")  # torch's other tests support these alone
    if differentiable:
        utils.append("test_autograd_registration")  # what test_aot_dispatch_dynamic finds, the check "compile" does
    args = tuple(tensors(subject.op, base).values())
    for function, bound, options, _ in _registered(subject, direction, args):
        for arg in bound.values():
            if differentiable and isinstance(arg, Tensor) and arg.is_floating_point():
                arg.requires_grad_()
        with subject.naming_forms(args), use(subject.backend, fallback="raise", adapt="none"):
            torch.library.opcheck(function, tuple(bound.values()), options, test_utils=utils)

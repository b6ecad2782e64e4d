"""What the conformance kit tries through torch: autograd, checkpoints, compiled code, fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    checkpoint as torch_checkpoint,  # pyright: ignore[reportUnknownVariableType]
)

import fusedops
from fusedops._op import Direction
from fusedops.testing._calls import tensors
from fusedops.testing._subject import Call, Form, Subject, in_dtype, laid_out, name_of, several
from fusedops.testing._trial import Trial
from fusedops.testing._trials import transposed


def fake(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """``torch.ops.fusedops.<op>`` of fake tensors says the shape, dtype and strides that the kernel gives."""
    for base in subject.bases(direction)[:1]:
        yield Trial("contiguous", partial(_fake, subject, direction, base, torch.Tensor.contiguous))
        yield Trial("transposed", partial(_fake, subject, direction, base, transposed))
        narrow = in_dtype(base, torch.bfloat16)
        if subject.takes(narrow, direction):
            yield Trial("bfloat16", partial(_fake, subject, direction, narrow, torch.Tensor.contiguous))


def _fake(subject: Subject, direction: Direction, call: Call, form: Form) -> None:
    op = subject.op
    made = tensors(call).values()
    args: Sequence[Any] = [form(v) if isinstance(v, Tensor) and v.dim() > 1 else v for v in made]
    name = op.name
    if direction == "backward":
        _, grad, y = subject.answered(args)
        args, name = op.backward_args(form(grad), y, args, subject.needs(args)), f"{op.name}_backward"
    function: Any = getattr(torch.ops.fusedops, name).default
    names = op.parameters if direction == "forward" else op.backward_parameters
    with torch.no_grad(), subject.alone({direction: 1}, dict(zip(names, args))):
        real = function(*args)
    with FakeTensorMode() as mode, torch.no_grad():
        faked = function(*[mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args])
    for place, (got, said) in enumerate(zip(several(real), several(faked))):
        what = "the output" if direction == "forward" else f"the gradient of {op.differentiable[place]}"
        given, needed = _layout(got), _layout(said)
        if given != needed:
            raise AssertionError(f"{what} is {given}; the fake tensor, by which code is compiled, says {needed}")


def _layout(tensor: Tensor) -> str:
    return f"{name_of(tensor.dtype)} {tuple(tensor.shape)} with strides {tuple(tensor.stride())}"


def autograd(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """The public function under autograd, in every dtype: the backend serves both directions."""
    for base in _both(subject):
        for dtype in subject.op.tolerance:
            call = in_dtype(base, dtype)
            if subject.takes(call, "forward") and subject.takes(call, "backward"):
                yield Trial(name_of(dtype), partial(_differentiated, subject, call, 1, _plainly))


def checkpoint(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """In an activation checkpoint: forward runs again, by the same backend."""
    for base in _both(subject):
        yield Trial("non-reentrant", partial(_differentiated, subject, base, 2, _checkpointed))


def compile_(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """In code compiled by torch.compile(fullgraph=True)."""
    for base in _both(subject):
        yield Trial("fullgraph", partial(_compiled, subject, base))


def _compiled(subject: Subject, base: Call) -> None:
    try:
        _differentiated(subject, base, 1, _compile)
    finally:
        torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _both(subject: Subject) -> list[Call]:
    return [call for call in subject.bases("forward") if subject.takes(call, "backward")][:1]


def _plainly(public: Callable[..., Tensor], args: Sequence[Any]) -> Tensor:
    return public(*args)


def _checkpointed(public: Callable[..., Tensor], args: Sequence[Any]) -> Tensor:
    again = cast("Callable[..., Tensor]", torch_checkpoint)
    return again(public, *args, use_reentrant=False, context_fn=fusedops.checkpoint_contexts)


def _compile(public: Callable[..., Tensor], args: Sequence[Any]) -> Tensor:
    return torch.compile(lambda *given: public(*given), fullgraph=True, backend="aot_eager")(*args)


def _differentiated(
    subject: Subject, call: Call, forwards: int, way: Callable[[Callable[..., Tensor], Sequence[Any]], Tensor]
) -> None:
    op = subject.op
    made = tensors(call)
    want, grad, _ = subject.answered(tuple(made.values()))
    for name in want.gradients:
        made[name] = made[name].requires_grad_()
    args = tuple(made.values())
    with subject.alone({"forward": forwards, "backward": 1}, {**made, "grad": grad}):
        y = way(subject.public, args)
        found = torch.autograd.grad(y, [made[name] for name in want.gradients], grad)
    laid_out(y, "the output", op.output(*args))
    subject.within(y, want.y, args)
    for (name, wanted), gradient in zip(want.gradients.items(), found):
        subject.within(gradient, wanted, args, name)


def opcheck(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """torch.library.opcheck of the registered ops."""
    for base in _both(subject):
        yield Trial("forward", partial(_opcheck, subject, base, "forward"))
        yield Trial("backward", partial(_opcheck, subject, base, "backward"))


def _opcheck(subject: Subject, base: Call, direction: Direction) -> None:
    op, made = subject.op, tensors(base)
    args: Sequence[Any] = tuple(made.values())
    function: Any = getattr(torch.ops.fusedops, op.name).default
    if direction == "backward":
        _, grad, y = subject.answered(args)
        args = op.backward_args(grad, y, args, subject.needs(args))
        function = getattr(torch.ops.fusedops, f"{op.name}_backward").default
    utils = ["test_schema", "test_faketensor"]
    if torch.device(subject.device).type in ("cpu", "cuda"):  # torch's others know no more devices than these
        utils.append("test_autograd_registration")
        if direction == "forward":  # whose trace has backward in it too
            utils.append("test_aot_dispatch_dynamic")
        for arg in args:
            if isinstance(arg, Tensor) and arg.is_floating_point():
                arg.requires_grad_()
    with fusedops.use(subject.backend, fallback="raise", adapt="none"):
        torch.library.opcheck(function, tuple(args), test_utils=utils)

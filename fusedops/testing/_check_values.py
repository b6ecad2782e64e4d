"""Checks of the kernels' values: named cases, special numbers, masked rows, dropped elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from fusedops._contract.evidence import Case
from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._report.direction import Direction
from fusedops.testing._calls import Call, arguments, dtype_name, followed, shrunk, specs, tensors
from fusedops.testing._contents import NAN_CHOICE
from fusedops.testing._roles import flags, masked_tensor, masks, numbers, probabilities, seeds
from fusedops.testing._subject import Subject
from fusedops.testing._trial import Trial


def float64(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield the op's named cases in every dtype. A case that cannot be cut to the elements has one dtype, in turn.

    In a brief run every case has one.
    """
    large = 0
    for case in subject.op.evidence.cases:
        trials: list[Trial] = []
        is_large = False
        for dtype in subject.op.evidence.tolerance:
            for rows in (2, 4, 32):  # as few as the constraints allow
                small = shrunk(case, subject.elements, rows)
                call = subject.complete(specs(subject.op, small, dtype, subject.device))
                if subject.takes(call, direction):
                    run = partial(_check_case, subject, direction, small, dtype)
                    trials.append(Trial(f"{case.name} {dtype_name(dtype)}", run))
                    sizes = [value.numel() for value in call.values() if isinstance(value, TensorSpec)]
                    is_large = is_large or max(sizes) > subject.elements
                    break
        if trials and (is_large or subject.brief):
            large += 1
            yield trials[large % len(trials)]
        else:
            yield from trials


def _check_case(subject: Subject, direction: Direction, case: Case, dtype: torch.dtype) -> None:
    subject.assert_right(direction, arguments(subject.op, case, dtype, subject.device))


_INF, _NAN = float("inf"), float("nan")
_SPECIAL = {"NaN": (_NAN,), "inf": (_INF, -_INF), "large": (3e4, -3e4)}
_UNDER_MASK = {  # values under the mask, the value beside it, the deviation that excuses the case
    "NaN and inf under the mask": ((_NAN, _INF, -_INF), None, "nonfinite-under-mask"),
    "large scores under the mask": ((3e4,), None, ""),
    "scores of -30000 beside the mask": ((0.0,), -3e4, "finite-fill"),
    "scores of -9000 beside the mask": ((0.0,), -9e3, ""),  # a declared fill is -10000 or less
}


def special(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield NaN, inf and large values: each reaches the elements that the reference lets it reach, and no other."""
    op = subject.op
    for base in subject.bases(direction)[:1]:
        bare: Call = {**base, **dict.fromkeys(masks(op))}
        for name, values in _SPECIAL.items() if subject.takes(bare, direction) else ():
            excuse = NAN_CHOICE if op.evidence.pin_choice and name == "NaN" else ""
            yield Trial(name, partial(_check_special, subject, bare, values), excuse)
        if op.evidence.pin_choice and subject.takes(bare, direction):
            yield Trial("NaN in other rows", partial(_check_choice_of_other_rows, subject, bare), "nondeterministic")
        for mask in masks(op):
            if base[mask] is None or masked_tensor(op, mask) is None:
                continue
            defaults = dict(zip(op.parameters, op.defaults))  # a scale of 0.1 makes large scores small
            plain = {**base, **{name: defaults[name] for name in numbers(op) if isinstance(defaults[name], float)}}
            plain = plain if subject.takes(plain, direction) else base
            for name, (under, beside, excuse) in _UNDER_MASK.items():
                yield Trial(name, partial(_check_under_mask, subject, plain, mask, under, beside), excuse)
            yield Trial("NaN under the mask of other rows", partial(_check_other_rows, subject, plain, mask))


def _check_special(subject: Subject, base: Call, values: Sequence[float]) -> None:
    first = subject.op.parameters[0]
    real = tensors(subject.op, base)
    x = real[first].cpu()
    for at, value in enumerate(values):
        x.view(-1)[at * 7 + 3] = value
    real[first] = x.to(subject.device)
    subject.assert_right("forward", tuple(real.values()))


def _check_choice_of_other_rows(subject: Subject, base: Call) -> None:
    """Put NaN in every second row of a choice: the rows between are as without it, also where that is excused."""
    first = subject.op.parameters[0]
    real = tensors(subject.op, base)
    without = subject.forward(tuple(real.values()))
    x = real[first].cpu()
    x.view(without[-1].shape[:-1].numel(), -1)[1::2, ::3] = _NAN
    real[first] = x.to(subject.device)
    for name, got, wanted in zip(subject.op.outputs, subject.forward(tuple(real.values())), without):
        between, before = (y.cpu().reshape(-1, y.shape[-1])[::2] for y in (got, wanted))
        if not torch.equal(between, before):
            what = subject.output_name(name)
            raise AssertionError(f"got other bits of {what} in rows without NaN, expected the same: others have it")


def _check_under_mask(subject: Subject, base: Call, mask: str, under: Sequence[float], beside: float | None) -> None:
    name = masked_tensor(subject.op, mask) or ""
    real = tensors(subject.op, base)
    masked = real[mask].bool().cpu().expand(real[name].shape)
    x = real[name].cpu()
    if beside is not None:
        x = torch.full_like(x, beside)
    for at, value in enumerate(under):
        chosen = torch.zeros_like(masked).view(-1)
        chosen[at :: len(under)] = True
        x = x.masked_fill(masked & chosen.view(masked.shape), value)
    real[name] = x.to(subject.device)
    subject.assert_right("forward", tuple(real.values()))


def _check_other_rows(subject: Subject, base: Call, mask: str) -> None:
    """Put NaN under the mask of every second row: the rows between are as without it, also where that is excused."""
    name = masked_tensor(subject.op, mask) or ""
    real = tensors(subject.op, base)
    masked = real[mask].bool().cpu().expand(real[name].shape).clone()
    masked[..., ::2, :] = False
    real[name] = real[name].cpu().masked_fill(masked, _NAN).to(subject.device)
    args = tuple(real.values())
    want = subject.expected_forward(args)
    rank = masked.dim()  # an output may have one element for each row

    def between(y: Tensor) -> Tensor:
        return y[..., ::2, :] if y.dim() == rank else y[..., ::2]

    limits = {name: between(limit) for name, limit in want.limits.items() if name.startswith("output ")}
    kept = replace(want, outputs=tuple(map(between, want.outputs)), limits=limits)
    subject.assert_outputs([*map(between, subject.forward(args))], kept, args)


def masked_rows(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield rows without an unmasked position: exactly 0, and so is their gradient, by every kind of mask."""
    op = subject.op
    for base, mask in product(subject.bases(direction), masks(op)):
        if base[mask] is None:
            continue
        shape = base[masked_tensor(op, mask) or mask].shape
        choices = product((False, True), repeat=len(flags(op)))
        for kind, rows, values in product((torch.bool, torch.uint8), ("every row", "some rows"), choices):
            chosen = dict(zip(flags(op), values))
            call = {**base, mask: base[mask].replace(shape=shape, dtype=kind), **chosen}
            if subject.takes(call, direction):
                label = ", ".join((rows, dtype_name(kind), *(name for name, value in chosen.items() if value)))
                yield Trial(label, partial(_check_masked_rows, subject, direction, call, mask, rows))


def _check_masked_rows(subject: Subject, direction: Direction, call: Call, mask: str, rows: str) -> None:
    op = subject.op
    real = tensors(op, call)
    if rows == "every row":
        real[mask].fill_(1)
    else:
        real[mask][..., ::3, :] = 1
    dead = real[mask].bool().cpu().all(-1)
    args = tuple(real.values())
    if direction == "backward":
        answer = subject.answer(args)
        gradients = subject.gradients(answer.inputs, args)
        for name, gradient in gradients.items():
            _check_zeros(gradient, answer.want.gradients[name], dead, "the gradient of a fully masked row")
        subject.assert_gradients(gradients, answer.want, args)
        return
    want, outputs = subject.expected_forward(args), subject.forward(args)
    for output, wanted in zip(outputs, want.outputs):
        _check_zeros(output, wanted, dead, "a fully masked row")
    if op.evidence.pin_choice:
        subject.assert_right(direction, args)
        return
    subject.assert_outputs(outputs, want, args)
    if op.saved:
        subject.assert_right(direction, args, saving=(True,))


def _check_zeros(result: Tensor, wanted: Tensor, dead: Tensor, what: str) -> None:
    """Raise AssertionError where a result is not exactly 0 in the ``dead`` rows in which the reference's is."""
    if wanted.shape[:-1] != dead.shape:
        return
    values = result.cpu()[dead & (wanted == 0).all(-1)]
    if (values != 0).any():
        raise AssertionError(f"got {float(values[values != 0][0]):g} in {what}, expected exactly 0")


def has_dropout(op: Op) -> bool:
    """Return True for an op with a seed and a probability."""
    return bool(seeds(op) and probabilities(op))


def dropout(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Yield seeds and probabilities: the elements kept are those of ``fusedops.testing.keep_mask``."""
    op = subject.op
    first, (seed, *_), (p, *_) = op.parameters[0], seeds(op), probabilities(op)
    for base in subject.bases(direction)[:1]:
        shape: tuple[int, ...] = base[first].shape
        longer = followed(op, base, first, (*shape[:-1], shape[-1] * 7))
        call = longer if subject.takes(longer, direction) else base
        for probability, value in ((0.1, 1), (0.5, 2**40 + 7), (0.9, -5), (0.3, 2**63 - 1)):
            changed = {**call, p: probability}
            run = partial(_check_dropout, subject, direction, changed, seed, value)
            yield Trial(f"{p} = {probability}, {seed} = {value}", run)


def _check_dropout(subject: Subject, direction: Direction, call: Call, seed: str, value: int) -> None:
    """Compare the zeros of a call of ones with the reference's, whose keep-mask is ``keep_mask``'s."""
    op = subject.op
    real = {n: torch.zeros_like(v) if isinstance(v, Tensor) else v for n, v in tensors(op, call).items()}
    first = op.parameters[0]
    real[first] = torch.ones_like(real[first])
    real[seed] = torch.full_like(real[seed], value)
    args = tuple(real.values())
    answer = subject.answer(args, torch.ones_like)
    if direction == "forward":
        result, wanted = subject.forward(args)[0], answer.want.y
    else:
        result, wanted = subject.gradients(answer.inputs, args)[first], answer.want.gradients[first]
    wrong = int(((result.cpu() != 0) != (wanted != 0)).sum())
    if wrong:
        raise AssertionError(
            f"got {wrong} of {wanted.numel()} elements kept or dropped, expected those of fusedops.testing.keep_mask"
        )

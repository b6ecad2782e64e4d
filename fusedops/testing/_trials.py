"""What the conformance kit tries on each kernel, beside its limits: one function a check, which yields its cases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from fusedops._op import Case, Direction
from fusedops._spec import TensorSpec
from fusedops.ops._philox import keep_mask
from fusedops.testing._calls import arguments, shrunk, specs, tensors
from fusedops.testing._subject import Call, Form, Subject, followed, in_dtype, name_of
from fusedops.testing._trial import Trial

_LONG = 17  # times the rows of the smallest call: more than one block of a kernel has


def kernel(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """There is a kernel, and it takes a call."""

    def there() -> None:
        if direction not in subject.entries:
            raise AssertionError("has no backward kernel: another backend serves the gradient of what it computes")
        if not subject.bases(direction):
            raise AssertionError("takes none of the op's named cases, in any dtype, at any of the sizes tried")

    yield Trial("takes a call", there, "no-backward")


def float64(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """The op's named cases in every dtype."""
    for case in subject.op.cases:
        for dtype in subject.op.tolerance:
            for rows in (4, 32):  # as few as the limits let
                small = shrunk(case, subject.elements, rows)
                if subject.takes(subject.complete(specs(subject.op, small, dtype, subject.device)), direction):
                    yield Trial(f"{case.name} {name_of(dtype)}", partial(_named, subject, direction, small, dtype))
                    break


def _named(subject: Subject, direction: Direction, case: Case, dtype: torch.dtype) -> None:
    subject.holds(direction, arguments(subject.op, case, dtype, subject.device))


def inputs(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Every dtype, no input written, gradients included."""
    for base in subject.bases(direction)[:1]:
        for dtype in subject.op.tolerance:
            call = in_dtype(base, dtype)
            if subject.takes(call, direction):
                yield Trial(name_of(dtype), partial(_unwritten, subject, direction, call))


def _unwritten(subject: Subject, direction: Direction, call: Call) -> None:
    _run(subject, direction, call)


def _run(subject: Subject, direction: Direction, call: Call) -> list[Tensor]:
    """The kernel's results, whether right or wrong, but laid out as they are to be."""
    args = tuple(tensors(call).values())
    if direction == "forward":
        return [subject.forward(args)]
    _, grad, y = subject.answered(args)
    return [*subject.gradients(grad, y, args, subject.needs(args)).values()]


def dtypes(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """One tensor in bfloat16 beside others in float32: the output, and each gradient, has the dtype that is its own."""
    for base in subject.bases(direction)[:1]:
        wide = in_dtype(base, torch.float32)
        floating = [name for name, value in wide.items() if isinstance(value, TensorSpec) and value.is_floating_point()]
        for name in floating:
            call = {**wide, name: replace(wide[name], dtype=torch.bfloat16)}
            if subject.output(call).dtype == torch.float32 and subject.takes(call, direction):
                yield Trial(f"{name} bfloat16", partial(_mixed, subject, direction, call))


def _mixed(subject: Subject, direction: Direction, call: Call) -> None:
    subject.holds(direction, tuple(tensors(call).values()))


def strides(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Transposed, cut out of something wider, and expanded tensors, the gradient's too."""
    for base in subject.bases(direction)[:1]:
        for form in (transposed, cut, expanded):
            yield Trial(form.__name__, partial(_strided, subject, direction, base, form))
        if direction == "backward":
            yield Trial("gradient of sum()", partial(_of_sum, subject, base))


def _of_sum(subject: Subject, base: Call) -> None:
    subject.holds("backward", tuple(tensors(base).values()), lambda grad: grad.new_ones(()).expand(grad.shape))


def _strided(subject: Subject, direction: Direction, base: Call, form: Form) -> None:
    made = tensors(base).values()
    args = tuple(form(value) if isinstance(value, Tensor) and value.dim() > 1 else value for value in made)
    subject.holds(direction, args, form)


def transposed(tensor: Tensor) -> Tensor:
    """The same values, the last two dimensions the other way round in memory."""
    return tensor.mT.contiguous().mT


def cut(tensor: Tensor) -> Tensor:
    """The same values, every second column of a wider tensor."""
    wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    wide[..., ::2] = tensor
    return wide[..., ::2]


def expanded(tensor: Tensor) -> Tensor:
    """The first row for every row, in the memory of one: stride 0."""
    return tensor[..., :1, :].expand(tensor.shape)


def empty(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """No rows, no columns, no batch."""
    first = subject.op.parameters[0]
    for base in subject.bases(direction)[:1]:
        shape: tuple[int, ...] = base[first].shape
        for dim in range(len(shape)):
            call = followed(base, first, (*shape[:dim], 0, *shape[dim + 1 :]))
            if subject.takes(call, direction):
                yield Trial(f"{first} dim {dim - len(shape)} = 0", partial(_mixed, subject, direction, call))


def special(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """NaN, inf and large values: each goes where the reference lets it, and nowhere else."""
    for base in subject.bases(direction)[:1]:
        bare = {**base, "mask": None} if "mask" in base else base
        for name, values in _SPECIAL.items() if subject.takes(bare, direction) else ():
            yield Trial(name, partial(_special, subject, bare, values))
        if base.get("mask") is not None:
            plain = {**base, "scale": 1.0}
            plain = plain if subject.takes(plain, direction) else base
            for name, (under, beside, excuse) in _UNDER_MASK.items():
                yield Trial(name, partial(_under_mask, subject, plain, under, beside), excuse)


_INF, _NAN = float("inf"), float("nan")
_SPECIAL = {"NaN": (_NAN,), "inf": (_INF, -_INF), "large": (3e4, -3e4)}
_UNDER_MASK = {
    "NaN and inf under the mask": ((_NAN, _INF, -_INF), None, "nonfinite-under-mask"),
    "large scores under the mask": ((3e4,), None, ""),
    "scores of -30000 beside the mask": ((0.0,), -3e4, "finite-fill"),
}


def _special(subject: Subject, base: Call, values: Sequence[float]) -> None:
    first = subject.op.parameters[0]
    made = tensors(base)
    x = made[first].cpu()
    for at, value in enumerate(values):
        x.view(-1)[at * 7 + 3] = value
    made[first] = x.to(subject.device)
    subject.holds("forward", tuple(made.values()))


def _under_mask(subject: Subject, base: Call, under: Sequence[float], beside: float | None) -> None:
    first = subject.op.parameters[0]
    made = tensors(base)
    masked = made["mask"].bool().cpu().expand(made[first].shape)
    x = made[first].cpu()
    if beside is not None:
        x = torch.full_like(x, beside)
    for at, value in enumerate(under):
        place = torch.zeros_like(masked).view(-1)
        place[at :: len(under)] = True
        x = x.masked_fill(masked & place.view(masked.shape), value)
    made[first] = x.to(subject.device)
    subject.holds("forward", tuple(made.values()))


def masked_rows(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Rows without an unmasked position: exactly 0, and so is their gradient, by every kind of mask."""
    first = subject.op.parameters[0]
    for base in subject.bases(direction):
        if base.get("mask") is None:
            continue
        for kind, rows, causal in product((torch.bool, torch.uint8), ("every row", "some rows"), (False, True)):
            call = {**base, "mask": replace(base[first], dtype=kind), "causal": causal}
            if subject.takes(call, direction):
                label = f"{rows}, {name_of(kind)}{', causal' * causal}"
                yield Trial(label, partial(_masked_rows, subject, direction, call, rows))


def _masked_rows(subject: Subject, direction: Direction, call: Call, rows: str) -> None:
    made = tensors(call)
    dead = made["mask"]
    dead[..., ::3, :] = 1
    if rows == "every row":
        dead.fill_(1)
    made["mask"] = dead
    args = tuple(made.values())
    is_dead = dead.bool().cpu().all(-1)
    if direction == "forward":
        found, what = subject.forward(args), "a fully masked row"
    else:
        _, grad, y = subject.answered(args)
        found = subject.gradients(grad, y, args, subject.needs(args))[subject.op.parameters[0]]
        what = "the gradient of a fully masked row"
    values = found.cpu()[is_dead]
    if (values != 0).any():
        raise AssertionError(f"{what} has {float(values[values != 0][0]):g}; needs exactly 0")
    subject.holds(direction, args)


def dropout(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """The keep bits of each element are those of the seed and its index (``fusedops.testing.keep_mask``)."""
    first = subject.op.parameters[0]
    for base in subject.bases(direction)[:1]:
        shape: tuple[int, ...] = base[first].shape
        for p, seed in ((0.1, 1), (0.5, 2**40 + 7), (0.9, -5), (0.3, 2**63 - 1)):
            call = followed(base, first, (*shape[:-1], shape[-1] * 7))
            call = call if subject.takes(call, direction) else base
            yield Trial(f"p = {p}, seed = {seed}", partial(_dropout, subject, direction, {**call, "p": p}, seed))


def _dropout(subject: Subject, direction: Direction, call: Call, seed: int) -> None:
    made = {n: torch.zeros_like(v) if n in subject.op.tensors else v for n, v in tensors(call).items()}
    first = subject.op.parameters[0]
    made[first] = torch.ones_like(made[first])
    made["seed"] = torch.tensor([seed], dtype=torch.int64).to(subject.device)
    args = tuple(made.values())
    if direction == "forward":
        found = subject.forward(args)
    else:
        y = torch.ones_like(subject.op.output(*args))
        found = subject.gradients(y, y, args, subject.needs(args))[first]
    keep = keep_mask(torch.tensor([seed]), call["p"], found.shape)
    wrong = int(((found.cpu() != 0) != keep).sum())
    if wrong:
        raise AssertionError(f"{wrong} of {keep.numel()} elements are kept, or dropped, that should not be")


def determinism(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """Two runs give the same bits."""
    first = subject.op.parameters[0]
    for base in subject.bases(direction)[:1]:
        shape: tuple[int, ...] = base[first].shape
        long = followed(base, first, (_LONG * shape[0], *shape[1:]))
        call = long if subject.takes(long, direction) else base
        yield Trial("three runs", partial(_determinism, subject, direction, call), "nondeterministic")


def _determinism(subject: Subject, direction: Direction, call: Call) -> None:
    once, *others = [_run(subject, direction, call) for _ in range(3)]
    for again in others:
        for first, second in zip(once, again):
            count = int((first != second).sum())
            if count:
                raise AssertionError(
                    f"two runs differ in {count} of {first.numel()} elements of {_result(subject, direction)}"
                )


def _result(subject: Subject, direction: Direction) -> str:
    return "the output" if direction == "forward" else f"the gradients of {' and '.join(subject.op.differentiable)}"


def needs(subject: Subject, direction: Direction) -> Iterator[Trial]:
    """A gradient that alone is asked for."""
    for base in subject.bases(direction)[:1]:
        for name in subject.op.differentiable:
            if base[name] is not None:
                yield Trial(f"{name} alone", partial(_needs, subject, base, name))


def _needs(subject: Subject, base: Call, name: str) -> None:
    args = tuple(tensors(base).values())
    want, grad, y = subject.answered(args)
    alone = tuple(other == name for other in subject.op.differentiable)
    subject.within(subject.gradients(grad, y, args, alone)[name], want.gradients[name], args, name)

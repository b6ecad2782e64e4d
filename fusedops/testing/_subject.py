"""What the conformance kit tests: one backend's kernels for one op, called so that nobody else may serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor

import fusedops
from fusedops._constraint import Constraint
from fusedops._entry import Entry
from fusedops._op import Direction, Op
from fusedops._registry import registry
from fusedops._spec import TensorSpec
from fusedops.errors import InvalidInputError
from fusedops.testing._calls import Expected, assert_within, expected, specs

Form = Callable[[Tensor], Tensor]  # gives a tensor other strides
Call = dict[str, Any]  # a forward call by parameter, in the op's order; each tensor as a TensorSpec

_ROWS = (9, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_COLUMNS = (33, 8, *_ROWS[1:])
# (each leading size, rows, columns), the smallest and least even first: limits on sizes are met by one of them
_SIZES = sorted(product((2, 1), _ROWS, _COLUMNS), key=lambda s: (_ROWS.index(s[1]) + _COLUMNS.index(s[2]), -s[0]))


class Subject:
    """One backend's kernels for one op, on one device; named cases are cut to about so many elements."""

    def __init__(self, backend: str, op: Op, device: str, elements: int) -> None:
        record = registry.find(backend)
        assert record is not None
        self.backend = backend
        self.op = op
        self.device = device
        self.elements = elements
        self.entries: dict[Direction, Entry] = {d: e for (name, d), e in record.entries.items() if name == op.name}
        self.public: Callable[..., Tensor] = op.positional(getattr(fusedops, op.name))

    # ------------------------------------------------------------------------------------------ calls, as specs

    def given(self, call: Call, direction: Direction) -> dict[str, Any]:
        """What the kernel of that direction gets for a call, by its own parameters."""
        if direction == "forward":
            return call
        y = self.output(call)
        needs = tuple(call[name] is not None for name in self.op.differentiable)
        return dict(zip(self.op.backward_parameters, self.op.backward_args(y, y, tuple(call.values()), needs)))

    def output(self, call: Call) -> TensorSpec:
        """The spec of the output."""
        y = self.op.output(*[_meta(value) if isinstance(value, TensorSpec) else value for value in call.values()])
        return TensorSpec(tuple(y.shape), y.dtype, self.device)

    def allows(self, call: Call) -> bool:
        """Whether the op's contract allows the call, on whatever backend."""
        try:
            self.op.validate(*call.values())
        except InvalidInputError:
            return False
        return True

    def takes(self, call: Call, direction: Direction) -> bool:
        """Whether the op allows the call and the kernel's limits take it."""
        check = self.entries[direction].check
        return self.allows(call) and (check is None or check(*self.given(call, direction).values()) is None)

    def named(self) -> Iterator[tuple[str, Call]]:
        """The op's named cases in every dtype, float32 first."""
        dtypes = sorted(self.op.tolerance, key=lambda dtype: dtype != torch.float32)
        for dtype in dtypes:
            for case in self.op.cases:
                yield f"{case.name} {name_of(dtype)}", self.complete(specs(self.op, case, dtype, self.device))

    def complete(self, call: Mapping[str, Any]) -> Call:
        """The call with every parameter, in the op's order."""
        return dict(zip(self.op.parameters, self.op.complete(self.op.bind((), call))))

    def bases(self, direction: Direction) -> list[Call]:
        """Small calls that the kernel takes: one for each set of tensors that is given; the most tensors first."""
        found: dict[tuple[str, ...], Call] = {}
        for _, case in self.named():
            given = tuple(name for name in self.op.tensors if case[name] is not None)
            if given not in found and (call := self._small(case, direction)):
                found[given] = call
        return [found[given] for given in sorted(found, key=len, reverse=True)]

    def _small(self, case: Call, direction: Direction) -> Call | None:
        first = self.op.parameters[0]
        rank = case[first].dim()
        for leading, rows, columns in _SIZES:
            call = followed(case, first, ((leading,) * (rank - 2) + (rows, columns))[-rank:])
            if self.takes(call, direction):
                return call
        return None

    # ------------------------------------------------------------------------------------------ calls, made

    @contextmanager
    def alone(self, wanted: Mapping[Direction, int], unchanged: Mapping[str, Any]) -> Generator[None]:
        """Lets only this backend serve what runs inside.

        Raises:
            AssertionError: another kernel ran too or in its place, or one of the ``unchanged`` arguments was written.
            NoBackendError: the backend's limits refuse the call.
        """
        tensors = {name: value for name, value in unchanged.items() if isinstance(value, Tensor)}
        before = {name: _bytes(value) for name, value in tensors.items()}
        ran_before = _ran()
        with fusedops.use(self.backend, fallback="raise", adapt="none"):
            yield
        ran = _ran() - ran_before
        needed = Counter({f"{self.backend}'s {self.op.name} {direction}": n for direction, n in wanted.items()})
        if ran != needed:
            raise AssertionError(f"{_told(ran)} ran; needs {_told(needed)} and nothing else")
        written = [name for name, value in tensors.items() if not torch.equal(_bytes(value), before[name])]
        if written:
            raise AssertionError(f"{' and '.join(written)} was written; needs every input as it was, bit for bit")

    def forward(self, args: Sequence[Any]) -> Tensor:
        """The output, by the backend's forward alone, laid out as the contract says."""
        with torch.no_grad(), self.alone({"forward": 1}, dict(zip(self.op.parameters, args))):
            y = self.public(*args)
        laid_out(y, "the output", self.op.output(*args))
        return y

    def gradients(self, grad: Tensor, y: Tensor, args: Sequence[Any], needs: tuple[bool, ...]) -> dict[str, Tensor]:
        """The gradients asked for, by the backend's backward alone, laid out as the contract says."""
        call = self.op.backward_args(grad, y, args, needs)
        with torch.no_grad(), self.alone({"backward": 1}, dict(zip(self.op.backward_parameters, call))):
            found: Any = getattr(torch.ops.fusedops, f"{self.op.name}_backward").default(*call)
        named = {name: g for name, g, need in zip(self.op.differentiable, several(found), needs) if need}
        for name, gradient in named.items():
            laid_out(gradient, f"the gradient of {name}", args[self.op.parameters.index(name)])
        return named

    def needs(self, args: Sequence[Any]) -> tuple[bool, ...]:
        """That every gradient which can be is asked for."""
        return tuple(args[self.op.parameters.index(name)] is not None for name in self.op.differentiable)

    def answered(self, args: Sequence[Any], form: Form | None = None) -> tuple[Expected, Tensor, Tensor]:
        """The float64 answer; the gradient (in that ``form``) and the output, which backward gets beside ``args``."""
        like = self.op.output(*args)
        want = expected(self.op, args)
        grad = want.grad.to(like.dtype).to(self.device)
        if form is not None:
            grad = form(grad)
            want = expected(self.op, args, grad=grad)
        return want, grad, want.y.to(like.dtype).to(self.device)

    def holds(self, direction: Direction, args: Sequence[Any], form: Form | None = None) -> None:
        """Asserts that the kernel is within the op's tolerance of float64.

        Args:
            direction: which kernel.
            args: a call's arguments, as the kernel is to get them.
            form: gives the gradient, which backward gets beside them, the strides that it is to have.
        """
        if direction == "forward":
            self.within(self.forward(args), expected(self.op, args).y, args)
            return
        want, grad, y = self.answered(args, form)
        for name, gradient in self.gradients(grad, y, args, self.needs(args)).items():
            self.within(gradient, want.gradients[name], args, name)

    def within(self, got: Tensor, want: Tensor, args: Sequence[Any], gradient_of: str = "") -> None:
        """Asserts that an output, or a gradient, is within the op's tolerance for the least exact of the dtypes."""
        of = self.op.gradient_tolerance if gradient_of else self.op.tolerance
        dtypes = [arg.dtype for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
        allowed = max((of[dtype] for dtype in dtypes), key=lambda tolerance: tolerance.relative)
        assert_within(got, want, allowed, f"the gradient of {gradient_of}" if gradient_of else "the output")

    def limits(self, direction: Direction) -> Sequence[Constraint]:
        """What the kernel declares."""
        return self.entries[direction].kernel.limits

    @cached_property
    def deviations(self) -> frozenset[str]:
        """The names of what the kernels declare to do otherwise."""
        return frozenset(d.name for entry in self.entries.values() for d in entry.kernel.deviations)


def several(results: Any) -> tuple[Tensor, ...]:
    """What a torch op returns: one tensor, or a tuple of them."""
    return cast("tuple[Tensor, ...]", results) if isinstance(results, tuple) else (results,)


def followed(call: Call, name: str, shape: tuple[int, ...]) -> Call:
    """The call with one tensor of another shape; what had its sizes, or its rank, follows."""
    old: tuple[int, ...] = call[name].shape
    changed: Call = {}
    for other, value in call.items():
        if other == name:
            changed[other] = replace(value, shape=shape)
        elif isinstance(value, TensorSpec) and value.dtype != torch.int64:
            if value.shape == old:
                sizes = shape
            else:
                aligned = range(-min(value.dim(), len(shape)), 0)
                sizes = tuple(
                    shape[at] if -at <= len(old) and value.shape[at] == old[at] else value.shape[at] for at in aligned
                )
            changed[other] = replace(value, shape=sizes)
        else:
            changed[other] = value
    return changed


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    """The call with every floating tensor in ``dtype``."""
    return {
        name: replace(value, dtype=dtype) if isinstance(value, TensorSpec) and value.is_floating_point() else value
        for name, value in call.items()
    }


def laid_out(got: Tensor, what: str, like: Tensor) -> None:
    """Asserts the dtype, shape and device of ``like``, contiguous."""
    given = (name_of(got.dtype), tuple(got.shape), str(got.device), got.is_contiguous())
    needed = (name_of(like.dtype), tuple(like.shape), str(like.device), True)
    if given != needed:
        strides = "contiguous" if given[3] else f"with strides {tuple(got.stride())}"
        raise AssertionError(
            f"{what} is {given[0]} {given[1]} on {given[2]}, {strides}; needs {needed[0]} {needed[1]} on {needed[2]}, "
            f"contiguous"
        )


def name_of(dtype: torch.dtype) -> str:
    """``float32``, without torch's name before it."""
    return str(dtype).removeprefix("torch.")


def _meta(spec: TensorSpec) -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


def _bytes(value: Tensor) -> Tensor:
    return value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _told(ran: Counter[str]) -> str:
    told = [name + (f" {count} times" if count > 1 else "") for name, count in sorted(ran.items())]
    return " and ".join(told) or "no kernel"


def _ran() -> Counter[str]:
    """How often each backend's kernels have run: a kernel can call an op, and so another backend, itself."""
    counts: Counter[str] = Counter()
    for count in fusedops.stats().counts:
        counts[f"{count.backend}'s {count.op} {count.direction}"] += count.calls
    return counts

"""verify: the results of kernels compared at run time with those of another backend, or of the op's reference."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.kernel import Kernel
from fusedops._contract.op import Op
from fusedops._dispatch.selection.decide import call_text
from fusedops._plugins.discovery import OWN_DISTRIBUTION
from fusedops._plugins.record import PreparedKernel, Record
from fusedops._plugins.registry import registry
from fusedops._policy import context
from fusedops._policy.context import ActivePolicy
from fusedops._report.direction import Direction
from fusedops._report.mismatch import Mismatch, Verification
from fusedops._verify.compare import difference, limits, with_choice
from fusedops._verify.result_form import ResultForm, as_tuple, result_forms, wrong_forms
from fusedops._verify.result_memory import Inputs, Results
from fusedops.dtypes import STORAGE, no_autocast
from fusedops.errors import FusedOpsWarning, InvalidInputError, MismatchError

REFERENCE = "reference"


class verify:
    """Compare the results of kernels with another backend's: ``with fusedops.verify(every=10) as report: ...``.

    Every n-th kernel call in the block, of this thread or task, forward and backward, is computed a second time by
    ``against`` from the same arguments, a dropout's seed among them. Gradients of calls of the block are compared also
    where backward runs after it. Outside such a block nothing is paid. The user gets the serving backend's result,
    unchanged; torch's generators are not used. A call whose numbers are not compared is counted with the reason.

    A result agrees where each element is within the op's tolerance of the reference, or within twice that of another
    backend, as each may differ: ``tolerance`` or ``gradient_tolerance`` of the op, as an error of each element by the
    op's error bound. So a large number in one row allows no error in another.

    The form must be the op's: number and type of the results, dtype, shape, device, contiguous strides (of gradients in
    any order). A result has memory of its own, not that of an input or a result in use. No input is written.

    Args:
        against: a backend, or "reference": the op's own reference in float64 on the CPU. None: the backend that serves
            every device.
        every: compare the first of so many calls of each op and direction.
        raise_on_mismatch: False goes on, and warns once at the end of the block.

    Raises:
        MismatchError: in the block, from the call or the backward that differs, in numbers, form or memory.
        PolicyError: there is no such backend, or it cannot run here.
        InvalidInputError: ``every`` is not a positive integer.

    >>> import torch, fusedops
    >>> with fusedops.verify("reference") as report:
    ...     y = fusedops.bias_gelu(torch.zeros(2))
    >>> report.mismatches
    0
    """

    def __init__(self, against: str | None = None, every: int = 1, raise_on_mismatch: bool = True) -> None:
        if type(every) is not int or every < 1:
            raise InvalidInputError(
                f"verify: got every = {every!r}, expected a positive integer; to fix: pass 10 to compare a tenth of "
                f"the calls"
            )
        self._record = None if against == REFERENCE else _record(against)
        self._every = every
        self._raise = raise_on_mismatch
        self._calls: dict[tuple[str, str], Any] = {}
        self._results = Results()
        self.report = Verification(self._record.name if self._record else REFERENCE)

    def __enter__(self) -> Verification:
        context.enter(self, self._derive, watches=True)
        return self.report

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        context.leave(self)
        if kind is None and self.report.mismatches and not self._raise:
            warnings.warn(
                f"got {self.report.mismatches} results beyond the tolerance; {self.report.worst}",
                FusedOpsWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        return f"verify(against={self.report.against!r}, every={self._every})"

    def _derive(self, outer: ActivePolicy) -> ActivePolicy:
        return ActivePolicy(outer.policy, self._watched)

    def _watched(self, kernel: PreparedKernel) -> PreparedKernel:
        """Return a copy of ``kernel`` whose calls are compared."""
        return kernel.with_call(partial(self._call, kernel))

    def _call(self, served: PreparedKernel, *args: Any) -> Any:
        op, kernel = served.op, served.kernel
        if next(self._calls.setdefault((kernel.op, kernel.direction), itertools.count())) % self._every:
            self.report.skip(f"not the first of every {self._every} calls")
            return served.call(*args)
        if args[0].is_cuda and torch.cuda.is_current_stream_capturing():
            self.report.skip("a CUDA graph is being captured")
            return served.call(*args)
        args = op.backward_call.without_reuse(args) if kernel.direction == "backward" else args
        with torch.no_grad():
            names = op.parameters_of(kernel.direction)
            inputs = Inputs({name: arg for name, arg in zip(names, args) if name not in op.written})
            why = self._not_comparable(served, args)
            chooses = kernel.direction == "forward" and op.evidence.pin_choice is not None
            # first: the kernel may write its inputs
            before = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args] if chooses else args
            expected = None if why or chooses else self._expected(op, kernel, op.with_copies(args))
        results = served.call(*args)
        with torch.no_grad():
            forms = result_forms(op, kernel.direction, args)
            several = len(forms) > 1 or (kernel.direction == "backward" and len(op.differentiable) > 1)
            wrong = [] if op.written else wrong_forms(forms, results, several, args[0].device)
            wrong += [(f"input {name}", "written, expected it unchanged") for name in inputs.written()]
            tensors: dict[str, Tensor] = {}
            if not wrong:
                found = zip(forms, as_tuple(results))
                tensors = {form.name: each for form, each in found if form.like is not None and each is not None}
                wrong = [] if op.written else self._results.shared(op.name, tensors, inputs.tensors)
            for name, text in wrong:
                self._record_one(served, args, name, math.inf, text, of_form=True)
            asked = args
            if tensors and chooses and not why:
                count = len(op.parameters)
                pinned = with_choice(op, before[:count], as_tuple(results)[: len(op.outputs)])
                asked = (*pinned, *before[count:])
                expected = self._expected(op, kernel, asked)
            if tensors and expected is not None:
                self._compare(served, args, asked, forms, tensors, as_tuple(expected))
            if why:
                self.report.skip(why)
        return results

    def _not_comparable(self, served: PreparedKernel, args: Sequence[Any]) -> str:
        """Return why the numbers of a call cannot be compared, or an empty text."""
        x: Tensor = args[0]
        if x.is_meta:
            return "meta tensors have no numbers"
        if self._record is None:
            return ""
        if served.backend == self._record.name:
            return f"served by {served.backend} itself"
        other = self._record.kernel(served.kernel.op, served.kernel.direction, x.device.type)
        if other is None:
            name = f"{served.kernel.op} {served.kernel.direction}"
            return f"{self._record.name} has no kernel for {name} on {x.device.type}"
        violated = other.check(*args[: len(served.op.parameters_of(served.kernel.direction))])  # without `save`
        return "" if violated is None else f"{self._record.name} refuses: {violated.describe()}"

    def _other(self, op: Op, kernel: Kernel, args: Sequence[Any]) -> PreparedKernel | None:
        """Return the other backend's kernel for a comparable call; None where the op's reference computes it."""
        if self._record is None:
            return None
        other = cast("PreparedKernel", self._record.kernel(kernel.op, kernel.direction, args[0].device.type))
        violated = other.check(*args[: len(op.parameters_of(kernel.direction))])
        return other if violated is None else None  # it may refuse a given choice

    def _expected(self, op: Op, kernel: Kernel, args: Sequence[Any]) -> Any:
        other = self._other(op, kernel, args)
        return _reference(op, kernel.direction, args) if other is None else other.call(*args)

    def _compare(
        self,
        served: PreparedKernel,
        args: Sequence[Any],
        asked: Sequence[Any],
        forms: Sequence[ResultForm],
        results: Mapping[str, Tensor],
        expected: tuple[Any, ...],
    ) -> None:
        """Compare the numbers of results, whose form is right, with those of the other computation.

        ``asked`` are the arguments of that: those of the kernel, with its choice where it has one.
        """
        direction, against = served.kernel.direction, self.report.against
        found = [results.get(form.name) for form in forms]
        if any(given is None and result is not None for given, result in zip(expected, found)):
            # a saved value that the other backend does not keep
            references = as_tuple(_reference(served.op, direction, asked))
            expected = tuple(own if given is None else given for given, own in zip(expected, references))
        others = [each if _same_shape(each, result) else None for each, result in zip(expected, found)]
        dtypes = [None if result is None else result.dtype for result in found]
        rounded = self._record is not None
        other_kernel = self._other(served.op, served.kernel, asked)
        kernels = [served.kernel, *([other_kernel.kernel] if other_kernel else [])]
        accepted = limits(served.op, direction, asked, others, dtypes, kernels, rounded)
        for form, result, other, limit, given in zip(forms, found, others, accepted, expected):
            if result is None or (given is None and form.optional):
                continue
            if other is None or limit is None:
                ratio, text = math.inf, f"it is {_described(result)}, and {against}'s {_described(given)}"
            else:
                worst = difference(result, other, limit)
                ratio = worst.ratio
                text = f"element {worst.element} is {worst.result:.7g}, {against}'s {worst.expected:.7g}"
                text += f", {ratio:.3g} times the tolerance" if ratio < math.inf else ""
            self._record_one(served, args, form.name, ratio, text)

    def _record_one(
        self, served: PreparedKernel, args: Sequence[Any], name: str, ratio: float, text: str, of_form: bool = False
    ) -> None:
        """Add a comparison to the report, and raise where it is a mismatch."""
        op, kernel = served.op, served.kernel
        args = tuple(tuple(cast("list[bool]", arg)) if isinstance(arg, list) else arg for arg in args)  # torch's bool[]
        args = args[: len(names := op.parameters_of(kernel.direction))]  # without `save`
        given = call_text(names, op.specs(args))
        self.report.add(op.name, served.backend, name, given, ratio)
        if ratio <= 1:
            return
        mismatch = Mismatch(
            op.name,
            kernel.direction,
            served.backend,
            self.report.against,
            name,
            text,
            given,
            ratio,
            kernel.location,
            args,
            of_form,
        )
        if self.report.worst is None or ratio > self.report.worst.ratio:
            self.report.worst = mismatch
        if self._raise:
            raise MismatchError(mismatch)


def _record(name: str | None) -> Record:
    """Return the backend to compare with: the named one, or this distribution's for any device."""
    if name is None:
        own = [r for r in registry.records() if r.distribution == OWN_DISTRIBUTION and r.backend]
        name = next((r.name for r in own if r.backend and r.backend.serves("*") and r.backend.priority <= 0), str(None))
    return registry.ready(name, "verify", (REFERENCE,))


def _reference(op: Op, direction: Direction, args: Sequence[Any]) -> Any:
    """Compute the results of a kernel by the op's reference, in float64 on the CPU."""
    with no_autocast("cpu"):
        wide = [_in_float64(arg) for arg in args]
        return op.reference_with_saved(*wide) if direction == "forward" else op.backward(*wide)


def _in_float64(arg: Any) -> Any:
    if isinstance(arg, torch.dtype):
        return torch.float64
    if not isinstance(arg, Tensor):
        return arg
    on_cpu = arg.detach().cpu()
    return on_cpu.double() if on_cpu.dtype in STORAGE else on_cpu  # codes of 8 bits stay what they are


def _same_shape(value: Any, result: Tensor | None) -> bool:
    return isinstance(value, Tensor) and result is not None and value.shape == result.shape


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"

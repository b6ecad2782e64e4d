"""verify: what kernels give, compared at run time with what another backend, or the op's reference, gives."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._backend import Kernel
from fusedops._decision import in_words
from fusedops._entry import Entry
from fusedops._in_force import Frame, frame
from fusedops._op import OPS, Direction, Op, Tolerance
from fusedops._policy import unknown_name
from fusedops._registry import OWN_DISTRIBUTION, Record, registry
from fusedops._verification import Mismatch, Verification
from fusedops.errors import FusedOpsWarning, InvalidInputError, MismatchError, PolicyError

REFERENCE = "reference"
_GOLDEN = (math.sqrt(5) - 1) / 2


class verify:
    """Compares what kernels give with what another backend gives: ``with fusedops.verify(sample=0.1) as report: ...``.

    Each sampled kernel call in the block, of this thread or task, forward and backward, is computed a second time by
    ``against`` from the same arguments, a dropout's seed among them. Gradients of calls of the block are compared also
    where backward runs after it. Outside such a block nothing is paid. What the user gets is the served backend's
    result, unchanged; torch's generators are left alone.

    A result agrees where it is within the op's tolerance (its ``tolerance`` or ``gradient_tolerance``, in
    ``fusedops/ops``) of the reference, or within twice that of another backend, as each may be off. Tolerances are for
    numbers such as the tests draw: of arguments beyond 16 the absolute part grows in proportion, of gradients it is in
    units of the largest of ``grad``, and of one that is a sum over n elements times the square root of n.

    Args:
        against: a backend, or "reference": the op's own reference in float64 on the CPU. None: the backend that
            serves every device, ``eager``.
        sample: the part of calls to compare, of each op and direction, in (0, 1]. The first one always is; the rest
            are spread evenly, the same on each run.
        raise_on_mismatch: False goes on, and warns once at the end of the block.

    Raises:
        MismatchError: in the block, from the call or the backward that differs.
        PolicyError: there is no such backend, or it cannot run here.
        InvalidInputError: ``sample`` is not in (0, 1].
    """

    def __init__(self, against: str | None = None, sample: float = 1, raise_on_mismatch: bool = True) -> None:
        if not 0 < sample <= 1:
            raise InvalidInputError(f"verify: sample is {sample}; needs a part of all calls in (0, 1], such as 0.1")
        self._record = None if against == REFERENCE else _record(against)
        self._sample = sample
        self._raise = raise_on_mismatch
        self._calls: dict[tuple[str, str], Any] = {}
        self.report = Verification(self._record.name if self._record else REFERENCE)

    def __enter__(self) -> Verification:
        frame.set(Frame((), frame.get(), False, self))
        return self.report

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        inside = frame.get()
        assert inside is not None, "verify() left in another context than it was entered"
        frame.set(inside.outer)
        if kind is None and self.report.mismatches and not self._raise:
            warnings.warn(
                f"{self.report.mismatches} results differ; {self.report.worst}", FusedOpsWarning, stacklevel=2
            )

    def watched(self, entry: Entry) -> Entry:
        """A copy of ``entry`` whose calls are compared."""
        return entry.calling(partial(self._call, entry))

    def _call(self, entry: Entry, *args: Any) -> Any:
        kernel = entry.kernel
        calls = self._calls.setdefault((kernel.op, kernel.direction), itertools.count())
        # multiples of the golden ratio, less their whole part, are spread evenly, and meet no period of layers
        if (next(calls) * _GOLDEN) % 1 >= self._sample:
            return entry.call(*args)
        excuse = self._excuse(entry, args)
        if excuse:
            self.report.skip(excuse)
            return entry.call(*args)
        with torch.no_grad():
            wanted = self._wanted(kernel, args)  # first: a kernel that writes into its inputs must not spoil it
        got = entry.call(*args)
        with torch.no_grad():
            self._compare(entry, args, got, wanted)
        return got

    def _excuse(self, entry: Entry, args: Sequence[Any]) -> str:
        """Why a call cannot be compared, or nothing."""
        x: Tensor = args[0]
        if x.is_meta:
            return "meta tensors have no numbers"
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        if self._record is None:
            return ""
        if entry.backend == self._record.name:
            return f"served by {entry.backend} itself"
        other = self._record.entries.get((entry.kernel.op, entry.kernel.direction))
        backend = self._record.backend
        if other is None or backend is None or not backend.serves(x.device.type):
            return (
                f"{self._record.name} has no kernel for {entry.kernel.op} {entry.kernel.direction} on {x.device.type}"
            )
        limit = None if other.check is None else other.check(*args)
        return "" if limit is None else f"{self._record.name} refuses: needs {limit.describe()}"

    def _wanted(self, kernel: Kernel, args: Sequence[Any]) -> Any:
        if self._record is not None:
            return self._record.entries[kernel.op, kernel.direction].call(*args)
        op = OPS[kernel.op]
        with torch.autocast("cpu", enabled=False):
            wide = [_wide(arg) for arg in args]
            return op.call_reference(wide) if kernel.direction == "forward" else op.call_backward(wide)

    def _compare(self, entry: Entry, args: tuple[Any, ...], got: Any, wanted: Any) -> None:
        op, kernel = OPS[entry.kernel.op], entry.kernel
        args = tuple(tuple(cast("list[bool]", arg)) if isinstance(arg, list) else arg for arg in args)  # torch's bool[]
        forward = kernel.direction == "forward"
        kinds = ("output",) if forward else tuple(f"gradient of {name}" for name in op.differentiable)
        parameters = op.parameters if forward else op.backward_parameters
        given = in_words(parameters, op.specs(args))
        for what, mine, other in zip(kinds, _each(got), _each(wanted)):
            if mine is None and other is None:
                continue
            ratio, off = self._difference(op, kernel.direction, args, mine, other)
            self.report.add(op.name, entry.backend, what, given, ratio)
            if ratio <= 1:
                continue
            mismatch = Mismatch(
                op.name,
                kernel.direction,
                entry.backend,
                self.report.against,
                what,
                off,
                given,
                ratio,
                kernel.where,
                args,
            )
            if self.report.worst is None or ratio > self.report.worst.ratio:
                self.report.worst = mismatch
            if self._raise:
                raise MismatchError(mismatch)

    def _difference(
        self, op: Op, direction: Direction, args: Sequence[Any], got: Any, wanted: Any
    ) -> tuple[float, str]:
        """How far apart two results are, in units of what is allowed, and where, in words."""
        for what in ("shape", "dtype"):
            mine, other = getattr(got, what, None), getattr(wanted, what, None)
            if mine != other and (what == "shape" or self._record is not None):
                return math.inf, f"its {what} is {_plain(mine)}, and {self.report.against}'s {_plain(other)}"
        if got.numel() == 0:
            return 0.0, ""
        allowed, times = _allowed(op, direction, args, got), 2 if self._record is not None else 1
        mine, other = got.detach().cpu().double(), wanted.detach().cpu().double()
        limit = times * (allowed.absolute + allowed.relative * other.abs())
        same = (mine == other) | (mine.isnan() & other.isnan())
        ratios = torch.where(same, 0.0, (mine - other).abs() / limit).nan_to_num(nan=math.inf, posinf=math.inf)
        at = tuple(int(i) for i in torch.unravel_index(ratios.argmax(), ratios.shape))
        ratio = float(ratios[at])
        here, there = float(mine[at]), float(other[at])
        off = f"element {at} is {here:.7g}, {self.report.against}'s {there:.7g}, {ratio:.3g} times what is allowed"
        return ratio, off


def _record(name: str | None) -> Record:
    """The backend to compare with."""
    if name is None:
        found = next(
            (
                r
                for r in registry.records()
                if r.distribution == OWN_DISTRIBUTION and r.backend and r.backend.serves("*")
            ),
            None,
        )
    else:
        found = registry.find(name)
    if found is None:
        raise PolicyError(f"verify: {unknown_name('backend', str(name), [*registry.names(), REFERENCE])}")
    refusal = found.refusal()
    if refusal is not None:
        raise PolicyError(
            f"verify: backend {found.name!r} cannot run here: {refusal.detail}; needs one that can; to do: "
            f"{refusal.fix}"
        )
    return found


def _allowed(op: Op, direction: Direction, args: Sequence[Any], got: Tensor) -> Tolerance:
    """The op's tolerance, of the coarsest dtype in the call, in proportion to the call's numbers."""
    tensors = [arg for arg in (*args, got) if isinstance(arg, Tensor) and arg.is_floating_point()]
    table = op.tolerance if direction == "forward" else op.gradient_tolerance
    found = max((table[tensor.dtype] for tensor in tensors), key=lambda tolerance: tolerance.relative)
    size = math.prod(max(1.0, abs(float(arg))) for arg in args if isinstance(arg, (int, float)))
    if direction == "forward":
        size *= max(1.0, max(map(_largest, tensors)) / 16)
    else:
        size *= _largest(args[0]) * math.sqrt(max(1.0, args[0].numel() / got.numel()))
    return Tolerance(found.absolute * size, found.relative)


def _largest(tensor: Tensor) -> float:
    """The largest magnitude that is finite."""
    finite = tensor.detach().abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(finite.max()) if finite.numel() else 0.0


def _wide(arg: Any) -> Any:
    if isinstance(arg, torch.dtype):
        return torch.float64
    if not isinstance(arg, Tensor):
        return arg
    there = arg.detach().cpu()
    return there.double() if there.is_floating_point() else there


def _plain(what: object) -> object:
    return tuple(what) if isinstance(what, torch.Size) else what


def _each(found: Any) -> tuple[Any, ...]:
    """The results of a kernel: one, or several."""
    return cast("tuple[Any, ...]", found) if isinstance(found, tuple) else (found,)

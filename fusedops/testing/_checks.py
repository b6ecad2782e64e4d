"""The conformance kit: what a backend must hold, as a list of checks, each of which runs on its own.

In every case of every check the backend's own kernel runs, once, and no other backend's: a case that another backend
serves is a failure. No input may be written, and every result is contiguous, of the shape and dtype that the op says.
"""

from __future__ import annotations

import json
import shlex
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from fusedops._op import OPS, Direction, Op
from fusedops._policy import unknown_name
from fusedops._registry import Record, registry
from fusedops.errors import FusedOpsWarning, PluginError, PolicyError
from fusedops.testing import _limits, _through_torch, _trials
from fusedops.testing._subject import Subject
from fusedops.testing._trial import Trial

ELEMENTS = 2**17  # of a named case; in milliseconds on a CPU, and as large as the least that Ascend's limits let be

Side = Literal["forward", "backward", "both"]


class _Kind(NamedTuple):
    """A check as it is for any op: its name, which sides it has, what the contract says, and its cases."""

    name: str
    sides: tuple[Side, ...]
    contract: str
    trials: Callable[[Subject, Direction], Iterator[Trial]]
    concerns: Callable[[Op], bool] = lambda op: True


def _has_mask(op: Op) -> bool:
    return "mask" in op.parameters


def _has_seed(op: Op) -> bool:
    return "seed" in op.parameters


def _has_several(op: Op) -> bool:
    return len(op.differentiable) > 1


_EACH: tuple[Side, ...] = ("forward", "backward")
_KINDS = (
    _Kind("kernel", _EACH, "a kernel for each direction, which takes some call of the op", _trials.kernel),
    _Kind(
        "limits",
        _EACH,
        "what is inside a declared limit is served, and right; what is outside is refused, with the reason",
        _limits.limits,
    ),
    _Kind("float64", _EACH, "within the op's tolerance of its reference in float64", _trials.float64),
    _Kind("inputs", _EACH, "no input is written, nor the output's gradient", _trials.inputs),
    _Kind(
        "dtypes",
        _EACH,
        "the output has the promoted dtype, each gradient its own input's",
        _trials.dtypes,
        _has_several,
    ),
    _Kind("strides", _EACH, "tensors of any strides, the gradient's too", _trials.strides),
    _Kind("empty", _EACH, "tensors without elements", _trials.empty),
    _Kind("special", ("forward",), "NaN, inf and large values go where the reference lets them", _trials.special),
    _Kind(
        "masked_rows", _EACH, "a fully masked row is exactly 0, and so is its gradient", _trials.masked_rows, _has_mask
    ),
    _Kind("dropout", _EACH, "an element is kept as fusedops.testing.keep_mask says", _trials.dropout, _has_seed),
    _Kind("needs", ("backward",), "any of the gradients may be asked for alone", _trials.needs, _has_several),
    _Kind("fake", _EACH, "shape, dtype and strides as the op's fake tensor says", _through_torch.fake),
    _Kind("determinism", _EACH, "the same bits on every run", _trials.determinism),
    _Kind("autograd", ("both",), "forward and backward of one call by one backend", _through_torch.autograd),
    _Kind("opcheck", ("both",), "torch.library.opcheck finds nothing", _through_torch.opcheck),
    _Kind("compile", ("both",), "the same within torch.compile(fullgraph=True)", _through_torch.compile_),
    _Kind("checkpoint", ("both",), "the same within an activation checkpoint", _through_torch.checkpoint),
)


@dataclass(frozen=True)
class Failure:
    """A case that did not hold.

    Attributes:
        case: its name.
        seen: what was seen, in one sentence.
        reproduce: a line of Python that runs this case alone.
        traceback: where it was raised.
    """

    case: str
    seen: str
    reproduce: str
    traceback: str = ""


@dataclass
class Result:
    """What one check found.

    Attributes:
        check: which one.
        cases: how many it ran.
        failures: those that did not hold.
        excused: those that did not hold and that a deviation, which the backend declares, names: (case, deviation).
    """

    check: Check
    cases: int = 0
    failures: list[Failure] = field(default_factory=lambda: [])
    excused: list[tuple[str, str]] = field(default_factory=lambda: [])
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-ready data."""
        return {
            "op": self.check.op,
            "direction": self.check.direction,
            "check": self.check.name,
            "contract": self.check.contract,
            "cases": self.cases,
            "seconds": round(self.seconds, 3),
            "failures": [asdict(failure) for failure in self.failures],
            "excused": [{"case": case, "deviation": deviation} for case, deviation in self.excused],
        }

    def __str__(self) -> str:
        lines = [f"{self.check.id} on {self.check.backend}: {len(self.failures)} of {self.cases} cases failed"]
        for failure in self.failures:
            lines += ["", f"case       {failure.case}", f"seen       {failure.seen}"]
            lines += [f"contract   {self.check.contract}", f"reproduce  {failure.reproduce}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Check:
    """Something that a backend must hold for one op. It holds names alone: the backend is looked up when it runs.

    Attributes:
        backend: its name.
        device: where its tensors are.
        elements: what the op's named cases are cut to.
        op: the op's name.
        direction: "forward", "backward", or "both" for a call with its gradient.
        name: what is checked.
    """

    backend: str
    device: str
    elements: int
    op: str
    direction: Side
    name: str

    @property
    def id(self) -> str:
        """``op/direction/name``."""
        return f"{self.op}/{self.direction}/{self.name}"

    @property
    def contract(self) -> str:
        """What the contract says."""
        return self._kind.contract

    @property
    def _subject(self) -> Subject:
        return Subject(self.backend, OPS[self.op], self.device, self.elements)

    @property
    def _kind(self) -> _Kind:
        return next(kind for kind in _KINDS if kind.name == self.name)

    def trials(self) -> Iterator[Trial]:
        """The cases, one by one."""
        return self._kind.trials(self._subject, "forward" if self.direction == "both" else self.direction)

    def run(self) -> Result:
        """Runs every case. A failure is in the result, and not raised."""
        result = Result(self)
        deviations = self._subject.deviations
        began = time.perf_counter()
        for trial in self.trials():
            result.cases += 1
            try:
                _alone(trial)
            except Exception as error:  # a kernel may raise anything: it is what the report is about
                if trial.excuse and trial.excuse in deviations:
                    result.excused.append((trial.case, trial.excuse))
                    continue
                seen = str(error) if isinstance(error, AssertionError) else f"raised {type(error).__name__}: {error}"
                where = "".join(traceback.format_exception(type(error), error, error.__traceback__))
                result.failures.append(Failure(trial.case, seen, self._line(trial.case), where))
        result.seconds = time.perf_counter() - began
        return result

    def _line(self, case: str) -> str:
        text = f'"{self.backend}", "{self.id}", {json.dumps(case)}, device="{self.device}", elements={self.elements}'
        return f"python -c {shlex.quote(f'from fusedops import testing; testing.reproduce({text})')}"


def _alone(trial: Trial) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of compiling and tracing
        warnings.simplefilter("error", FusedOpsWarning)
        trial.run()


def checks(backend: str, device: str | None = None, op: str | None = None, elements: int = ELEMENTS) -> list[Check]:
    """What a backend must hold, for each op that it has kernels for.

    Args:
        backend: the name of an installed or registered one.
        device: where to run it. None: the CPU where it serves that, else the first of its device types.
        op: one op alone.
        elements: how large a tensor of the op's named cases may be, about; fewer for a slow device.

    Raises:
        PolicyError: there is no backend, or no op, of that name.
        PluginError: the backend did not load, cannot run here, or does not serve the device.
    """
    record = _ready(backend)
    plugin = record.backend
    assert plugin is not None
    where = device or ("cpu" if plugin.serves("cpu") else plugin.device_types[0])
    try:
        kind = torch.empty(0, device=where).device.type
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        raise PluginError(
            f"device is {where!r}, which torch cannot use here: {error}; needs one that it can; name another"
        ) from error
    if not plugin.serves(kind):
        served = ", ".join(plugin.device_types)
        raise PluginError(f"device is {where!r}; needs one that {backend} serves: {served}; leave it out, or name that")
    names = list(dict.fromkeys(item.op for item in plugin.kernels))
    if op is not None and op not in names:
        raise PolicyError(f"check: {unknown_name(f'op of {backend}', op, names)}")
    return [
        Check(backend, where, elements, name, side, kind.name)
        for name in ([op] if op else names)
        for side in ("forward", "backward", "both")
        for kind in _KINDS
        if side in kind.sides and kind.concerns(OPS[name]) and _applies(record, name, side, kind)
    ]


def _ready(backend: str) -> Record:
    record = registry.find(backend)
    if record is None:
        raise PolicyError(f"check: {unknown_name('backend', backend, registry.names())}")
    refusal = record.refusal()
    if refusal is not None:
        raise PluginError(
            f"backend {backend!r} cannot be checked here: {refusal.detail}; needs one that can; to do: {refusal.fix}"
        )
    return record


def _applies(record: Record, op: str, side: Side, kind: _Kind) -> bool:
    """Whether there is something to check: without a backward kernel, that there is none; without limits, no limits."""
    entry: Any = record.entries.get((op, "forward" if side == "forward" else "backward"))
    if entry is None:
        return kind.name == "kernel" and side != "both"
    return kind.name != "limits" or bool(entry.kernel.limits)


def reproduce(backend: str, check: str, case: str, device: str | None = None, elements: int = ELEMENTS) -> None:
    """Runs one case of one check, as its failure says; what the kernel raises is raised.

    Args:
        backend: as for :func:`checks`.
        check: its id.
        case: its name.
        device: as for :func:`checks`.
        elements: as for :func:`checks`.

    Raises:
        AssertionError: it does not hold.
        PolicyError: there is no such backend, check or case.
    """
    found = {each.id: each for each in checks(backend, device, elements=elements)}
    if check not in found:
        raise PolicyError(f"reproduce: {unknown_name(f'check of {backend}', check, list(found))}")
    trials = list(found[check].trials())
    named = [trial for trial in trials if trial.case == case]
    if not named:
        raise PolicyError(f"reproduce: {unknown_name(f'case of {check}', case, [trial.case for trial in trials])}")
    for trial in named:
        _alone(trial)

"""The conformance kit: what a backend must meet, as a list of checks, each of which runs on its own.

In every case of every check the backend's own kernel runs, once, and no other backend's: a case that another backend
serves is a failure. No input may be written, and every result is contiguous, of the shape and dtype that the op gives.
"""

from __future__ import annotations

import json
import shlex
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fusedops._plugins.record import Record
from fusedops._plugins.registry import registry
from fusedops._report.suggestion import unknown_name
from fusedops.errors import FusedOpsWarning, PluginError, PolicyError
from fusedops.testing._failures import Failure, causes, observed
from fusedops.testing._kinds import KINDS, Kind, Side, kind_of
from fusedops.testing._subject import Subject
from fusedops.testing._trial import Trial

ELEMENTS = 2**17  # of a named case; milliseconds on a CPU, and as small as Ascend's constraints allow


@dataclass
class Result:
    """The result of one check. ``str()`` lists the causes of its failures, each once.

    Attributes:
        check: the check.
        cases: the number of cases that ran.
        failures: the cases that failed.
        excused: the cases that failed and that a deviation, which the backend declares, excuses: (case, deviation).
        seconds: the duration.

    >>> from fusedops import testing
    >>> print(testing.checks("eager", op="bias_gelu")[0].run())
    bias_gelu/forward/kernel on eager: 0 of 2 cases failed
    """

    check: Check
    cases: int = 0
    failures: list[Failure] = field(default_factory=lambda: [])
    excused: list[tuple[str, str]] = field(default_factory=lambda: [])
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-ready data."""
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
        for cause in causes((self.check.name, failure) for failure in self.failures):
            lines += ["", f"case       {cause.first.case}", f"seen       {cause.first.seen}"]
            lines += [f"contract   {cause.first.contract}", f"reproduce  {cause.first.reproduce}"]
            lines += [f"also       {cause.also}"] if cause.also else []
        return "\n".join(lines)


@dataclass(frozen=True)
class Check:
    """One thing that a backend must meet for one op. It holds names alone: the backend is looked up when it runs.

    Attributes:
        backend: its name.
        device: where its tensors are.
        elements: the size to which the op's named cases are cut.
        op: the op's name.
        direction: "forward", "backward", or "both" for a call with its gradient.
        name: what is checked.
        brief: True where it has fewer cases, see :func:`checks`.

    >>> from fusedops import testing
    >>> testing.checks("eager", op="bias_gelu")[0].contract
    'a kernel for each direction, which takes some call of the op'
    """

    backend: str
    device: str
    elements: int
    op: str
    direction: Side
    name: str
    brief: bool = False

    @property
    def id(self) -> str:
        """``op/direction/name``."""
        return f"{self.op}/{self.direction}/{self.name}"

    @property
    def contract(self) -> str:
        """The part of the contract that is checked."""
        return kind_of(self.name).contract

    @property
    def _subject(self) -> Subject:
        return Subject(self.backend, registry.ops[self.op], self.device, self.elements, brief=self.brief)

    def trials(self) -> Iterator[Trial]:
        """Yield the cases."""
        return kind_of(self.name).trials(self._subject, "forward" if self.direction == "both" else self.direction)

    def run(self, command: Callable[[str], str] | None = None) -> Result:
        """Run every case. Failures are in the result, with ``command(case)``: else Python for an installed backend."""
        result = Result(self)
        deviations = self._subject.deviations_of("backward" if self.direction == "backward" else "forward")
        start = time.perf_counter()
        for trial in self.trials():
            result.cases += 1
            try:
                _run(trial)
            except Exception as error:  # a kernel may raise anything, and the result reports it
                # a deviation is of a result: a kernel that raises is not excused
                if trial.excuse in deviations and isinstance(error, AssertionError):
                    result.excused.append((trial.case, trial.excuse))
                    continue
                seen, contract = observed(error, self.contract)
                where = "".join(traceback.format_exception(type(error), error, error.__traceback__))
                reproduce = (command or self._command)(trial.case)
                result.failures.append(Failure(trial.case, seen, contract, reproduce, where))
        result.seconds = time.perf_counter() - start
        return result

    def _command(self, case: str) -> str:
        text = f'"{self.backend}", "{self.id}", {json.dumps(case)}, device="{self.device}", elements={self.elements}'
        text += ", brief=True" if self.brief else ""
        return f"python -c {shlex.quote(f'from fusedops import testing; testing.reproduce({text})')}"


def _run(trial: Trial) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of compiling and tracing
        warnings.simplefilter("error", FusedOpsWarning)
        trial.run()


def checks(
    backend: str, device: str | None = None, op: str | None = None, elements: int = ELEMENTS, *, brief: bool = False
) -> list[Check]:
    """Return what a backend must meet, for each op that it has kernels for.

    Args:
        backend: the name of an installed or registered backend.
        device: where to run. None: the CPU where the backend serves that, else the first of its device types.
        op: one op alone.
        elements: the size to which the op's named cases are cut, about; fewer for a slow device.
        brief: True for about a quarter of the cases: each value of an argument is in two calls, not in one with each
            value of each other argument; each named case, and each absence of saved values, has one dtype, in turn;
            several tensors at once are in 16 bits, or one tensor; no two gradients are wanted alone. For a stand-in of
            a device in tests, whose numbers are another backend's. False for what is released.

    Raises:
        PolicyError: there is no backend, or no op, of that name.
        PluginError: the backend did not load, cannot run here, or does not serve the device.

    >>> from fusedops import testing
    >>> [check.id for check in testing.checks("eager", op="bias_gelu")][:3]
    ['bias_gelu/forward/kernel', 'bias_gelu/forward/float64', 'bias_gelu/forward/calls']
    """
    registry.whole()
    record = registry.ready(backend, "check", error=PluginError)
    plugin = record.backend
    assert plugin is not None
    where = device or ("cpu" if plugin.serves("cpu") else plugin.device_types[0])
    served = ", ".join(plugin.device_types)
    try:
        device_type = torch.empty(0, device=where).device.type
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        raise PluginError(
            f"check: got device {where!r}, which torch cannot use here ({error}), expected one that {backend} serves: "
            f"{served}; to fix: name another"
        ) from error
    if not plugin.serves(device_type):
        raise PluginError(
            f"check: got device {where!r}, expected one that {backend} serves: {served}; to fix: leave it out, or name "
            f"one of these"
        )
    names = list(dict.fromkeys(k.op for k in plugin.kernels if k.op in registry.ops and k.serves(device_type)))
    if op is not None and op not in names:
        raise PolicyError(f"check: {unknown_name(f'op of {backend}', op, names)}")
    return [
        Check(backend, where, elements, name, side, kind.name, brief)
        for name in ([op] if op else names)
        for side in ("forward", "backward", "both")
        for kind in KINDS
        if side in kind.sides and kind.concerns(registry.ops[name]) and _applies(record, name, side, kind, device_type)
    ]


def _applies(record: Record, op: str, side: Side, kind: Kind, device_type: str) -> bool:
    """Return True where there is something to check: without a backward kernel, only that there is none."""
    kernel = record.kernel(op, "forward" if side == "forward" else "backward", device_type)
    if side != "forward" and not registry.ops[op].has_gradient:
        return False
    if kernel is None:
        return kind.name == "kernel" and side != "both"
    if kind.name == "rows":
        return kernel.kernel.why_rows_depend(device_type) is None
    if kind.name == "recorded":
        return kernel.record is not None
    return kind.name != "constraints" or not kernel.unconditional


def reproduce(
    backend: str, check: str, case: str, device: str | None = None, elements: int = ELEMENTS, *, brief: bool = False
) -> None:
    """Run one case of one check, as its failure shows; what the kernel raises is raised.

    AssertionError where the case fails; PolicyError where there is no backend, check id or case of that name.

    >>> from fusedops import testing
    >>> testing.reproduce("eager", "bias_gelu/forward/float64", "ragged float32")
    """
    by_id = {each.id: each for each in checks(backend, device, elements=elements, brief=brief)}
    if check not in by_id:
        raise PolicyError(f"reproduce: {unknown_name(f'check of {backend}', check, list(by_id))}")
    trials = {trial.case: trial for trial in by_id[check].trials()}
    if case not in trials:
        raise PolicyError(f"reproduce: {unknown_name(f'case of {check}', case, list(trials))}")
    _run(trials[case])

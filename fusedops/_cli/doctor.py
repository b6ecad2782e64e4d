"""``fusedops doctor``: what is wrong with an installation, and the fixes."""

from __future__ import annotations

import argparse
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from fusedops._cli.installation import devices, is_installed, loaded, unknown_plugins
from fusedops._cli.output import print_fields, print_json, print_text
from fusedops._plugins.registration import BackendInfo, backends
from fusedops._plugins.registry import registry
from fusedops._policy.context import process_policy, unknown_variables
from fusedops._report.threads import spinning_threads, usable_cores
from fusedops.errors import FusedOpsError, FusedOpsWarning

HELP = "what is wrong with this installation, and the fixes"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        level: "problem" for what keeps calls from a backend that could serve them, or makes them raise; "note" for
            what costs speed or was chosen.
        what: one sentence.
        fix: what to do.
    """

    level: Literal["problem", "note"]
    what: str
    fix: str


def run(options: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    everything = sorted(findings(), key=lambda finding: finding.level == "note")
    count = sum(finding.level == "problem" for finding in everything)
    if options.json:
        print_json([asdict(finding) for finding in everything])
        return int(count > 0)
    lines = [line for each in everything for line in ((each.level, each.what), ("to fix", each.fix))]
    if lines:
        print_fields(lines, least=(8,))
    ready = [info.name for info in backends() if info.state == "ready"]
    print_text(f"{count or 'no'} problem{'s' * (count != 1)}; ready here: {', '.join(ready) or 'no backend'}")
    return int(count > 0)


def problems() -> Iterator[Finding]:
    """Yield the findings that are problems."""
    return (finding for finding in findings() if finding.level == "problem")


def findings() -> Iterator[Finding]:
    """Yield everything that can be found without a call."""
    yield from _settings()
    yield from _plugins()
    yield from _devices()
    yield from _torch()
    yield from _threads()
    yield from _spinning()


def _settings() -> Iterator[Finding]:
    for name, text in unknown_variables().items():
        what, _, fix = text.partition("; to fix: ")
        yield Finding("problem", what, f"unset {name}, or {fix}")
    for text in unknown_plugins():
        what, _, fix = text.partition("; to fix: ")
        yield Finding("problem", what, fix)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FusedOpsWarning)  # of unknown variables, reported above
            process_policy()
    except FusedOpsError as error:
        yield Finding("problem", str(error), "correct the variable: the first call of any op raises this")


def _plugins() -> Iterator[Finding]:
    for info in backends():
        if info.state == "failed":
            yield Finding("problem", f"backend {info.name} of {info.distribution} failed: {info.why}", info.fix)
    for record in registry.records():
        if record.backend is None and record.error is None and record.unavailable is not None:
            what = f"plugin {record.name} is disabled: {record.unavailable.why}"
            yield Finding("note", what, f"{record.unavailable.fix}, where it is to load")


def _devices() -> Iterator[Finding]:
    """Report the device types that are here and that no backend of their own serves."""
    every, here = backends(), devices()
    for kind in dict.fromkeys([*here, *(kind for info in every for kind in info.device_types)]):
        serving = [info for info in every if kind in info.device_types]
        names = {info.name for info in serving}
        tools = [tool for backend in loaded() if backend.name in names for tool in backend.tools]
        tool = next((tool for tool in tools if shutil.which(tool)), None)
        if not serving or kind == "*" or (kind not in here and tool is None):
            continue  # no such device, or only backends for every device
        seen = f"torch sees {', '.join(dict.fromkeys(here.get(kind, [])))}"
        if kind not in here:
            seen = f"{tool} is here, but torch sees no {kind} device"
        if kind == "cuda" and kind not in here and torch.version.cuda is None and torch.version.hip is None:
            what = f"{seen}: torch {torch.__version__} is a CPU build"
            yield Finding("problem", what, "install a CUDA or ROCm build of torch")
            continue
        is_served = _has_ready(kind, every)
        level: Literal["problem", "note"] = "note" if is_served else "problem"
        # a package of another vendor that is not installed is no finding; a library of ours that is not compiled is one
        optional = [
            backend for backend in loaded() if backend.optional and not all(map(is_installed, backend.packages))
        ]
        left_out = {backend.name for backend in optional} if is_served else set[str]()
        for info in serving:
            if info.state == "unavailable" and info.name not in left_out:  # a failed one is reported above
                yield Finding(level, f"{seen}, and backend {info.name} cannot serve it: {info.why}", info.fix)


def _has_ready(kind: str, every: list[BackendInfo]) -> bool:
    """Return True where a backend for this device type is ready. One for every device is enough on a CPU alone."""
    return any(info.state == "ready" and {kind, *("*" * (kind == "cpu"))} & {*info.device_types} for info in every)


def _torch() -> Iterator[Finding]:
    if torch.version.cuda is None:
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        return
    for warning in caught:  # torch names the version of an old driver
        what = f"torch {torch.__version__} cannot use the CUDA driver: {warning.message}"
        yield Finding("problem", what, f"install a newer driver, or a torch for CUDA below {torch.version.cuda}")
        return
    if shutil.which("nvidia-smi") is None:
        what = f"torch {torch.__version__} is a build for CUDA {torch.version.cuda}, and this machine has no GPU"
        yield Finding("note", what, "install the CPU build of torch, which is smaller; results are the same")


def _threads() -> Iterator[Finding]:
    cores = usable_cores()
    text = os.environ.get("LOCAL_WORLD_SIZE", "")  # of torchrun
    processes = int(text) if text.isdecimal() and text.isascii() and 0 < len(text) < 6 and int(text) else 1
    threads = torch.get_num_threads()
    if threads * processes > cores:
        ranks = f" in each of {processes} processes" if processes > 1 else ""
        what = f"torch runs {threads} threads{ranks} on {cores} core{'s' * (cores > 1)}: they wait for one another"
        fix = f"set OMP_NUM_THREADS={max(1, cores // processes)}, and OMP_WAIT_POLICY=passive, so that no thread spins"
        yield Finding("note", what, fix)


def _spinning() -> Iterator[Finding]:
    if text := spinning_threads():
        what, _, fix = text.partition("; to fix: ")
        yield Finding("note", what, fix)

"""What this installation is, and what is wrong with it: the data behind ``python -m fusedops info`` and ``doctor``."""

from __future__ import annotations

import os
import platform
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import fusedops
from fusedops._backend import Backend
from fusedops._in_force import process_policy, unknown_variables
from fusedops._op import OPS
from fusedops._registry import BackendInfo, backends, registry
from fusedops.errors import FusedOpsError, FusedOpsWarning


@dataclass(frozen=True)
class Problem:
    """Something that keeps calls from where they could be served: what, and what to do."""

    what: str
    fix: str


def environment() -> dict[str, Any]:
    """Versions, devices, policy and backends, as JSON-ready data: the text to paste into an issue."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FusedOpsWarning)  # doctor says what they say
            policy = str(process_policy())
    except FusedOpsError as error:
        policy = f"{type(error).__name__}: {error}"
    return {
        "fusedops": fusedops.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "versions": {name: _version(name) for name in ("pluggy", "numpy", *_packages())},
        "devices": devices(),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith("FUSEDOPS_")},
        "policy": policy,
        "backends": [_row(info) for info in backends()],
    }


def devices() -> dict[str, list[str]]:
    """Names of the devices that torch sees, by device type."""
    found = {"cpu": [platform.processor() or platform.machine()]}
    vendor = torch._C._get_privateuse1_backend_name()  # pyright: ignore[reportPrivateUsage]
    for kind in ("cuda", "xpu", "mps", vendor):
        module: Any = getattr(torch, kind, None)
        if module is not None and module.is_available():
            indices = range(int(module.device_count()))
            named = hasattr(module, "get_device_name")
            found[kind] = [str(module.get_device_name(i)) if named else f"{kind}:{i}" for i in indices]
    return found


def problems() -> Iterator[Problem]:
    """Everything wrong that can be seen without a call."""
    for name, sentence in unknown_variables().items():
        yield Problem(sentence, f"unset {name}, or correct its name")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FusedOpsWarning)
            process_policy()
    except FusedOpsError as error:
        yield Problem(str(error), "correct the variable: the first call of any op will raise this")
    found = backends()
    for info in found:
        if info.state == "failed":
            yield Problem(f"backend {info.name} of {info.distribution} failed: {info.why}", info.fix)
    here = devices()
    for kind in dict.fromkeys([*here, *(kind for info in found for kind in info.device_types)]):
        serving = [info for info in found if kind in info.device_types]
        names = {info.name for info in serving}
        tools = [tool for backend in _loaded() if backend.name in names for tool in backend.tools]
        tool = next((tool for tool in tools if shutil.which(tool)), None)
        if not serving or kind == "*" or (kind not in here and tool is None):
            continue  # no such device, or none but what serves every device: nothing to miss
        seen = (
            f"torch sees {', '.join(here[kind])}"
            if kind in here
            else f"{tool} is here, but torch sees no {kind} device"
        )
        if kind == "cuda" and kind not in here and torch.version.cuda is None and torch.version.hip is None:
            yield Problem(f"{seen}: torch {torch.__version__} is a CPU build", "install a CUDA or ROCm build of torch")
            continue
        if any(info.state == "ready" for info in serving):
            continue
        for info in serving:
            if info.state != "failed":  # said above
                yield Problem(f"{seen}, and backend {info.name} cannot serve it: {info.why}", info.fix)


def limits() -> dict[str, list[dict[str, Any]]]:
    """For each op, who has kernels for it, with limits, deviations and adaptations in words, and who has none."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in OPS}
    for record in registry.records():
        if record.backend is None:
            continue
        about = {"devices": list(record.backend.device_types), "ready": record.refusal() is None}
        for item in record.backend.kernels:
            found[item.op].append(
                {
                    "backend": record.name,
                    "direction": item.direction,
                    **about,
                    "limits": [limit.describe() for limit in item.limits],
                    "deviations": [f"{d.name}: {d.sentence}" for d in item.deviations],
                    "adaptations": [f"{a.name}: {a.sentence}" for a in item.adaptations],
                }
            )
        for op in set(OPS) - {item.op for item in record.backend.kernels}:
            nothing: dict[str, list[str]] = {"limits": [], "deviations": [], "adaptations": []}
            found[op].append({"backend": record.name, "direction": None, **about, **nothing})
    return found


def _row(info: BackendInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "state": info.state,
        "why": info.why,
        "fix": info.fix,
        "devices": list(info.device_types),
        "priority": info.priority,
        "ops": list(info.ops),
        "distribution": info.distribution,
        "version": info.version,
        "file": info.file,
        "error": info.error,
    }


def _packages() -> list[str]:
    return list(dict.fromkeys(package for backend in _loaded() for package in backend.packages))


def _loaded() -> list[Backend]:
    return [record.backend for record in registry.records() if record.backend is not None]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None

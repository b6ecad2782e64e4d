"""The installation as data: versions, devices, variables, policy, backends, plugins."""

from __future__ import annotations

import os
import platform
import re
import warnings
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import torch

import fusedops
from fusedops._contract.backend import Backend
from fusedops._contract.constraint import shown
from fusedops._plugins.discovery import ALLOW_LIST, GROUP
from fusedops._plugins.registration import BackendInfo, backends
from fusedops._plugins.registry import registry
from fusedops._policy.context import process_policy
from fusedops._report.suggestion import unknown_name
from fusedops._torch import private_device_name
from fusedops.errors import FusedOpsError
from fusedops.integrations import PACKAGES


def environment() -> dict[str, Any]:
    """Return versions, devices, policy and backends as JSON-ready data."""
    try:
        policy = str(process_policy().policy)
    except FusedOpsError as error:
        policy = f"{type(error).__name__}: {error}"
    return {
        "fusedops": fusedops.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "versions": {name: _version(name) for name in ("pluggy", "numpy", *_packages(), *PACKAGES)},
        "devices": devices(),
        "threads": threads(),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith("FUSEDOPS_")},
        "policy": policy,
        "ops": list(registry.ops),
        "backends": [_row(info) for info in backends()],
    }


def devices() -> dict[str, list[str]]:
    """Return the names of the devices that torch can use, by device type."""
    by_type = {"cpu": [_processor()]}
    vendor = private_device_name()
    for kind in ("cuda", "xpu", "mps", vendor):
        module: Any = getattr(torch, kind, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an old driver: doctor reports it
            if module is None or not hasattr(module, "is_available") or not module.is_available():
                continue
        indices = range(int(module.device_count()))
        has_names = hasattr(module, "get_device_name")
        by_type[kind] = [str(module.get_device_name(i)) if has_names else f"{kind}:{i}" for i in indices]
    return by_type


def threads() -> str:
    """Return the threads of torch, and how they wait."""
    return f"{torch.get_num_threads()}, OMP_WAIT_POLICY {os.environ.get('OMP_WAIT_POLICY', 'not set')}"


def loaded() -> list[Backend]:
    """Return the backends that loaded."""
    return [record.backend for record in registry.records() if record.backend is not None]


def unknown_plugins() -> list[str]:
    """Return a message for each name in FUSEDOPS_PLUGINS that no installed plugin has."""
    allowed = os.environ.get(ALLOW_LIST, "").strip()
    if allowed in ("", "all", "none"):
        return []
    known = sorted({point.name for point in entry_points(group=GROUP)})
    names = [name for name in (part.strip() for part in allowed.split(",")) if name and name not in known]
    return [f"{ALLOW_LIST}: {unknown_name('plugin', name, known)}" for name in names]


def _row(info: BackendInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "state": info.state,
        "why": info.why,
        "fix": info.fix,
        "devices": list(info.device_types),
        # an integer of thousands of digits has no text
        "priority": info.priority if info.priority.bit_length() <= 64 else shown(info.priority),
        "ops": list(info.ops),
        "distribution": info.distribution,
        "version": info.version,
        "file": info.file,
        "error": info.error,
    }


def _processor() -> str:
    """Return the name of the processor, and the instruction set for which torch selects its kernels."""
    name = ""
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8", "replace"), re.MULTILINE)
        name = found[1].strip() if found else ""
    return f"{name or platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def _packages() -> list[str]:
    packages = dict.fromkeys(package for backend in loaded() for package in backend.packages)
    return [name for name in packages if name != "torch"]  # it has a line of its own


def is_installed(distribution: str) -> bool:
    """Return True where this Python has a distribution of that name."""
    return _version(distribution) is not None


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None

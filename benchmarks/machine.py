"""The machine, the versions and the settings of a run."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fusedops
from benchmarks.gpu.packages import COMMIT

# With glibc's defaults, the page faults of a new 128 MiB tensor cost 4-5 times as much as copying it. An allocator that
# keeps memory is a better model of a training loop. The library itself never sets environment variables.
TUNED = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"


def environment(device: str, threads: int, allocator: str) -> dict[str, Any]:
    """Return the machine, versions and settings of a run."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] or None
    else:
        name, driver = f"{_processor()}, {os.cpu_count()} cores", None
        if device != "cpu":
            name = torch.get_device_module(device).get_device_name()
    return {
        "device": name,
        "driver": driver,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "python": platform.python_version(),
        "fusedops": fusedops.__version__,
        "commit": commit(),
        "threads": threads,
        "allocator": allocator,
    }


def commit() -> str:
    """Return the commit of the sources, and "+changes" where they differ from it."""
    # a run writes its results into the working tree, so results do not count as changes
    changes = _output_of("git", "status", "--porcelain", "--", ":!benchmarks/results")
    return os.environ.get(COMMIT) or _output_of("git", "rev-parse", "HEAD") + ("+changes" if changes else "")


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _output_of(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()

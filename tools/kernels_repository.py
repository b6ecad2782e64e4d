"""Write fusedops as a repository of the package kernels: python tools/kernels_repository.py FOLDER WHEEL ...

Each wheel becomes a variant: ``torch-stable-abi210-cpu-x86_64-linux`` and the like for one of a platform, whose
libraries link to no library of torch, and ``torch-universal``, without libraries, for the pure one, which kernels loads
where torch is a build for another device than a CPU. A variant has the wheel's packages, pluggy and the files of
tools/kernel. ``kernels.get_local_kernel`` loads the folder as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import zipfile
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
TORCH = "torch-stable-abi210"  # the least version of torch, 2.10
REQUIRED = ("pluggy",)  # what `import fusedops` needs beside torch


def variant_of(tag: str) -> str:
    """Return the name of the variant for a wheel's platform tag.

    Raises:
        ValueError: kernels has no name for the platform.

    >>> variant_of("manylinux_2_17_x86_64.manylinux2014_x86_64"), variant_of("macosx_11_0_arm64"), variant_of("any")
    ('torch-stable-abi210-cpu-x86_64-linux', 'torch-stable-abi210-cpu-aarch64-darwin', 'torch-universal')
    """
    if tag == "any":
        return "torch-universal"
    machine = re.search(r"(x86_64|amd64|aarch64|arm64)$", tag)
    system = next((name for start, name in _SYSTEMS.items() if start in tag), None)
    if machine is None or system is None:
        raise ValueError(f"got a wheel for {tag}, expected one of {', '.join(_SYSTEMS)} on x86_64 or aarch64")
    processor = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine[1], machine[1])
    return f"{TORCH}-cpu-{processor}-{system}"


_SYSTEMS = {"linux": "linux", "macosx": "darwin", "win": "windows"}


def write_variant(folder: Path, wheel: Path) -> Path:
    """Write one variant, and return its folder."""
    version, tag = re.fullmatch(r"fusedops-([^-]+)-py3-none-(.+)\.whl", wheel.name).groups()  # pyright: ignore
    out = folder / "build" / variant_of(tag)
    shutil.rmtree(out, ignore_errors=True)
    packages = out / "packages"
    packages.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    for name in REQUIRED:
        copy_installed(name, packages)
    for path in (HERE / "kernel").glob("*.py"):
        (out / path.name).write_text(path.read_text("utf-8").replace("@VERSION@", version), encoding="utf-8")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()[:12]
    about = {
        "id": f"_fusedops_{out.name.replace('-', '_')}_{digest}",
        "name": "fusedops",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (out / "metadata.json").write_text(f"{json.dumps(about, indent=2)}\n", encoding="utf-8")
    return out


def copy_installed(name: str, folder: Path) -> None:
    """Copy a pure package that is installed here, with its metadata and licence."""
    distribution = metadata.distribution(name)
    for file in distribution.files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(str(distribution.locate_file(file)), folder / file)


def main(arguments: list[str]) -> int:
    """Write the repository."""
    if len(arguments) < 2:
        print("got no folder and wheels, expected both; to fix: tools/kernels_repository.py build/kernels dist/*.whl")
        return 2
    folder = Path(arguments[0])
    for wheel in arguments[1:]:
        print(f"{write_variant(folder, Path(wheel))} from {wheel}")
    shutil.copy2(HERE / "kernel" / "README.md", folder)
    shutil.copy2(HERE.parent / "LICENSE", folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

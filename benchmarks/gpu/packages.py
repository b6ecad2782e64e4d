"""The import path of the steps: this repository with its entry points, and wheels, without pip, network or a build.

``python -m benchmarks.gpu.packages FOLDER`` compresses the wheels of a folder again, by LZMA: 46 MB of those of
``make gpu-wheels`` instead of 63. It then names the functions that ``benchmarks/peers.py`` would call with other
parameters than these releases have; the exit code is 1 where there is one.
"""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

from benchmarks.gpu import peer_signatures

ROOT = Path(__file__).parents[2]

#: The variable with the commit of the sources, where they are in no repository. FUSEDOPS_... would be a setting: the
#: environment is checked for names that are none.
COMMIT = "BENCHMARKS_COMMIT"


def python_path(work: Path, wheels: Path | None) -> str:
    """Return PYTHONPATH: the repository, the unpacked wheels, and what it was.

    Args:
        work: a folder to write to.
        wheels: a folder of .whl files, or None.
    """
    support = ROOT / "tests" / "support"
    folders = [_entry_points(work / "plugins"), ROOT, ROOT / "backends", support, ROOT / "tests"]
    folders += filter(Path.is_dir, support.iterdir())
    if wheels is not None:
        folders += _unpacked(wheels, work / "wheels")
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def _entry_points(folder: Path) -> Path:
    """Write the metadata that an installation has, for backends() and pytest to find the plugins."""
    import tomllib  # Python 3.11

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = (ROOT / "fusedops" / "_version.py").read_text(encoding="utf-8").split('"')[-2]
    metadata = folder / f"fusedops-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fusedops\nVersion: {version}\n", encoding="utf-8")
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {module}" for name, module in entries.items()), ""]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def _unpacked(wheels: Path, folder: Path) -> list[Path]:
    """Unpack wheels, and return the folders to import from, with those that .pth files name."""
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        except zipfile.BadZipFile as error:
            print(f"left out: {wheel}: {error}")
    lines = [line.strip() for path in sorted(folder.glob("*.pth")) for line in path.read_text().splitlines()]
    return [folder, *(folder / line for line in lines if line and (folder / line).is_dir())]


def compress(wheels: Path) -> None:
    """Compress wheels by LZMA. Python's zipfile reads them, pip too."""
    for wheel in sorted(wheels.glob("*.whl")):
        smaller = wheel.with_suffix(".tmp")
        with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(smaller, "w", zipfile.ZIP_LZMA) as target:
            for entry in archive.infolist():
                target.writestr(entry.filename, archive.read(entry))
        smaller.replace(wheel)


if __name__ == "__main__":
    compress(Path(sys.argv[1]))
    changed = [*peer_signatures.differences(Path(sys.argv[1]))]
    sys.exit("\n".join(changed) or None)

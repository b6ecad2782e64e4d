"""The compiled kernels of Triton's cache as one file, which the next run on a bare machine unpacks.

The intermediate code is left out, and the lists of files have no folders, so that the cache may lie elsewhere there.
Triton's keys hold the sources and the versions: a kernel that has changed is compiled. Another Python or Triton finds
nothing in it.
"""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from triton import knobs

#: The environment in which kernels are compiled: without the lines of the sources they have half of the size.
ENVIRONMENT = {"TRITON_DISABLE_LINE_INFO": "1"}
#: The largest file that a lent machine gives back, less a kernel and what the compressor holds back.
MOST = 14 * 2**20
_GROUP = "__grp__"  # how the name of a list of files begins
_KINDS = {".json", ".cubin", ".hsaco", ".so"}


def pack(archive: Path, most: int = MOST) -> tuple[int, int]:
    """Write the kernels, the newest first, until the archive has so many bytes; return how many are in it, and all."""
    folders = sorted((each for each in _cache().glob("*") if each.is_dir()), key=_when, reverse=True)
    count = 0
    with archive.open("wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as tar:
        for folder in folders:
            if file.tell() > most:
                break
            for path in sorted(each for each in folder.iterdir() if each.suffix in _KINDS):
                data = _listed(path) if path.name.startswith(_GROUP) else path.read_bytes()
                entry = tarfile.TarInfo(f"{folder.name}/{path.name}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
            count += 1
    return count, len(folders)


def unpack(archive: Path) -> int:
    """Add the kernels of an archive to the cache; return their number."""
    cache = _cache()
    with tarfile.open(archive, "r:gz") as tar:
        tar.extractall(cache, filter="data")
        names = tar.getnames()
    for path in (cache / name for name in names if f"/{_GROUP}" in name):
        files = json.loads(path.read_text(encoding="utf-8"))["child_paths"]
        path.write_text(json.dumps({"child_paths": {name: str(path.parent / name) for name in files}}), "utf-8")
    return len({name.partition("/")[0] for name in names})


def _cache() -> Path:
    return Path(knobs.cache.dir)


def _when(folder: Path) -> float:
    return folder.stat().st_mtime


def _listed(group: Path) -> bytes:
    """Return a list of files with those that are packed."""
    files = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
    kept = {name: name for name in files if Path(name).suffix in _KINDS}
    return json.dumps({"child_paths": kept}).encode()

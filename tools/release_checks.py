"""Checks of built distributions: each returns the problems of one file, as texts."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from packaging.metadata import Metadata
from packaging.utils import parse_sdist_filename, parse_wheel_filename

LARGEST = 4_000_000  # bytes; the wheels of 0.1.0 have 1.1 MB
GLIBC = (2, 17)  # of the manylinux tags
LIBRARIES = (".so", ".dylib", ".dll")
_UNWANTED = re.compile(
    r"(^|/)(__pycache__|\.venv|build|dist|\.git|\.ruff_cache)/|\.py[co]$|\.unfinished$|examples/out/"
)
_PACKAGES = re.compile(r"fusedops(_\w+)?/|_fusedops_pytest\.py$|fusedops-[^/]+\.dist-info/")
_IN_SDIST = (
    *("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "hatch_build.py", "Makefile"),
    *("fusedops/__init__.py", "tests/docs/test_docs.py", "docs/index.md", "tools/release.py", "PKG-INFO"),
)


def wheel_problems(path: Path, version: str, build_paths: Iterable[str]) -> list[str]:
    """Return what is wrong with a wheel: its metadata, contents, size, libraries, and paths of the build.

    Args:
        path: of the wheel.
        version: of the release.
        build_paths: texts that no file may contain.
    """
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    _, named_version, _, tags = parse_wheel_filename(path.name)
    info = f"fusedops-{version}.dist-info"
    problems = [*_shared_problems(path, files, build_paths), *_record_problems(files, f"{info}/RECORD")]
    if str(named_version) != version:
        problems.append(f"got version {named_version}, expected {version}")
    problems += _metadata_problems(files.get(f"{info}/METADATA"), version)
    if f"{info}/licenses/LICENSE" not in files:
        problems.append("got no licenses/LICENSE")
    if f"{info}/entry_points.txt" not in files:
        problems.append("got no entry_points.txt: no command, no backend")
    problems += [f"got {name}, expected packages of fusedops alone" for name in files if not _PACKAGES.match(name)]
    about = files.get(f"{info}/WHEEL", b"").decode()
    stated = set(re.findall(r"^Tag: (.+)$", about, re.M))
    if stated != {str(tag) for tag in tags}:
        problems.append(f"got the tags {sorted(stated)} in WHEEL, expected those of the file's name")
    is_pure = "Root-Is-Purelib: true" in about
    platforms = {tag.platform for tag in tags}
    libraries = {name: data for name, data in files.items() if name.endswith(LIBRARIES)}
    if is_pure != (platforms == {"any"}) or is_pure == bool(libraries):
        problems.append(f"got {len(libraries)} libraries, Root-Is-Purelib {is_pure}, platform {sorted(platforms)}")
    for name, data in libraries.items():
        problems += [f"{name}: {each}" for each in library_problems(data, sorted(platforms)[0])]
    return problems


def sdist_problems(path: Path, version: str, build_paths: Iterable[str]) -> list[str]:
    """Return what is wrong with a source distribution."""
    with tarfile.open(path) as archive:
        members = archive.getmembers()
        files = {m.name: archive.extractfile(m).read() for m in members if m.isfile()}  # pyright: ignore
    top = f"fusedops-{version}/"
    problems = [f"got {m.name}, a link or a device" for m in members if not (m.isfile() or m.isdir())]
    problems += [f"got {name}, expected files below {top}" for name in files if not name.startswith(top)]
    problems += [f"got no {name}" for name in _IN_SDIST if top + name not in files]
    problems += [f"got {name}, a built library" for name in files if name.endswith(LIBRARIES)]
    if str(parse_sdist_filename(path.name)[1]) != version:
        problems.append(f"got {path.name}, expected version {version}")
    problems += _metadata_problems(files.get(f"{top}PKG-INFO"), version)
    return [*problems, *_shared_problems(path, files, build_paths)]


def library_problems(data: bytes, platform: str) -> list[str]:
    """Return what is wrong with a shared library for a platform tag: its format, its processor, its glibc."""
    is_arm = platform.endswith(("aarch64", "arm64"))
    if platform.startswith(("manylinux", "linux")):
        right = data[:4] == b"\x7fELF" and data[18:20] == (b"\xb7\0" if is_arm else b"\x3e\0")
    elif platform.startswith("macosx"):
        right = data[:8] == b"\xcf\xfa\xed\xfe" + (b"\x0c\0\0\x01" if is_arm else b"\x07\0\0\x01")
    else:
        at = int.from_bytes(data[60:64], "little")
        right = data[:2] == b"MZ" and data[at : at + 6] == b"PE\0\0\x64\x86"
    problems = [] if right else [f"got another format or processor than that of {platform}"]
    versions = {(int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", data)}
    if platform.startswith("manylinux") and versions and max(versions) > GLIBC:
        problems.append(f"got symbols of glibc {max(versions)}, expected at most {GLIBC}")
    return problems


def _shared_problems(path: Path, files: Mapping[str, bytes], build_paths: Iterable[str]) -> list[str]:
    problems = [
        f"got {name}, which is no source and no part of the package" for name in files if _UNWANTED.search(name)
    ]
    problems += [f"got the path {name}" for name in files if ".." in PurePosixPath(name).parts or name.startswith("/")]
    size = path.stat().st_size
    if size > LARGEST:
        problems.append(f"got {size:,} bytes, expected at most {LARGEST:,}")
    for text in build_paths:
        problems += [
            f"{name} contains {text}, a path of the build" for name, data in files.items() if text.encode() in data
        ]
    return problems


def _metadata_problems(data: bytes | None, version: str) -> list[str]:
    if data is None:
        return ["got no metadata"]
    metadata = Metadata.from_email(data)  # raises where a field is not valid
    expected = {"name": "fusedops", "version": version, "license_expression": "Apache-2.0"}
    found = {key: str(getattr(metadata, key)) for key in expected}
    problems = [f"got {key} {found[key]}, expected {value}" for key, value in expected.items() if found[key] != value]
    if len(metadata.description or "") < 1000 or metadata.description_content_type != "text/markdown":
        problems.append("got no README as the description")
    if not metadata.requires_python or not metadata.requires_dist:
        problems.append("got no requires-python or no dependencies")
    return problems


def _record_problems(files: Mapping[str, bytes], record: str) -> list[str]:
    """Compare the files with RECORD: each has one line, with its hash and size."""
    rows = {name: (digest, size) for name, digest, size in csv.reader(files.get(record, b"").decode().splitlines())}
    problems = [f"got {name}, which is not in RECORD" for name in files if name not in rows]
    for name, (digest, size) in rows.items():
        if name == record:
            continue
        data = files.get(name)
        own = "" if data is None else base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if data is None or digest != f"sha256={own}" or size != str(len(data)):
            problems.append(f"{name} differs from RECORD")
    return problems

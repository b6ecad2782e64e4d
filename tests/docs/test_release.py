"""The release: each check finds its fault, and the distributions of this tree pass them."""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

pytest.importorskip("build")
pytest.importorskip("packaging")
sys.path.insert(0, str(ROOT / "tools"))
from downloads import text as downloads_text
from downloads import warning as cuda_warning
from release_checks import LARGEST, library_problems, sdist_problems, wheel_problems

README = "x" * 2000
METADATA = f"""\
Metadata-Version: 2.4
Name: fusedops
Version: 1.2.3
License-Expression: Apache-2.0
Requires-Python: >=3.10
Requires-Dist: torch>=2.10
Description-Content-Type: text/markdown

{README}
"""
ELF = b"\x7fELF" + bytes(14) + b"\x3e\0" + bytes(100)
TAG = "manylinux_2_17_x86_64"


def wheel(folder: Path, files: dict[str, bytes | None], tag: str = TAG, about: str = TAG, pure: bool = False) -> Path:
    """Write a wheel like one of fusedops, with some files changed, or left out where they are None."""
    info = "fusedops-1.2.3.dist-info"
    contents: dict[str, bytes | None] = {
        "fusedops/__init__.py": b"",
        f"{info}/METADATA": METADATA.encode(),
        f"{info}/WHEEL": f"Root-Is-Purelib: {str(pure).lower()}\nTag: py3-none-{about}\n".encode(),
        f"{info}/entry_points.txt": b"",
        f"{info}/licenses/LICENSE": b"",
        **({} if pure else {"fusedops/libfusedops-x86_64.so": ELF}),
        **files,
    }
    whole = {name: data for name, data in contents.items() if data is not None}
    if f"{info}/RECORD" not in whole:
        rows = [f"{name},sha256={digest(data)},{len(data)}" for name, data in whole.items()]
        whole[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]).encode()
    path = folder / f"fusedops-1.2.3-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in whole.items():
            archive.writestr(name, data)
    return path


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def test_a_right_wheel_has_no_problem(tmp_path: Path) -> None:
    assert wheel_problems(wheel(tmp_path, {}), "1.2.3", ["/home/builder"]) == []
    assert wheel_problems(wheel(tmp_path, {}, tag="any", about="any", pure=True), "1.2.3", []) == []


@pytest.mark.parametrize(
    ("files", "options", "problem"),
    [
        ({"fusedops/a.py": b"# /home/builder/x"}, {}, "fusedops/a.py contains /home/builder, a path of the build"),
        ({"fusedops/__pycache__/a.pyc": b""}, {}, "is no source and no part of the package"),
        ({"tests/test_a.py": b""}, {}, "got tests/test_a.py, expected packages of fusedops alone"),
        ({"fusedops/big.bin": bytes(LARGEST)}, {}, "bytes, expected at most"),
        ({"fusedops-1.2.3.dist-info/METADATA": None}, {}, "got no metadata"),
        (
            {"fusedops-1.2.3.dist-info/METADATA": METADATA.replace("1.2.3", "1.2.4").encode()},
            {},
            "got version 1.2.4, expected 1.2.3",
        ),
        ({"fusedops-1.2.3.dist-info/METADATA": METADATA.replace(README, "").encode()}, {}, "got no README"),
        ({"fusedops-1.2.3.dist-info/licenses/LICENSE": None}, {}, "got no licenses/LICENSE"),
        ({"fusedops-1.2.3.dist-info/entry_points.txt": None}, {}, "got no entry_points.txt"),
        ({"fusedops-1.2.3.dist-info/RECORD": b"fusedops/__init__.py,sha256=x,0"}, {}, "differs from RECORD"),
        ({"fusedops-1.2.3.dist-info/RECORD": b""}, {}, "fusedops/__init__.py, which is not in RECORD"),
        ({}, {"about": "linux_x86_64"}, "expected those of the file's name"),
        ({"fusedops/libfusedops-x86_64.so": None}, {}, "got 0 libraries"),
        ({}, {"tag": "any", "about": "any"}, "got 1 libraries, Root-Is-Purelib False, platform ['any']"),
        ({"fusedops/libfusedops-x86_64.so": ELF.replace(b"\x3e", b"\xb7")}, {}, "another format or processor"),
        ({"fusedops/libfusedops-x86_64.so": ELF + b"GLIBC_2.28"}, {}, "got symbols of glibc (2, 28)"),
    ],
)
def test_a_wrong_wheel_is_found(tmp_path: Path, files: dict[str, Any], options: dict[str, str], problem: str) -> None:
    problems = wheel_problems(wheel(tmp_path, files, **options), "1.2.3", ["/home/builder"])
    assert any(problem in each for each in problems), problems


def test_another_version_than_that_of_the_release_is_found(tmp_path: Path) -> None:
    assert "got version 1.2.3, expected 1.3.0" in wheel_problems(wheel(tmp_path, {}), "1.3.0", [])


@pytest.mark.parametrize(
    ("platform", "data"),
    [
        ("macosx_11_0_arm64", b"\xcf\xfa\xed\xfe\x0c\0\0\x01"),
        ("macosx_10_13_x86_64", b"\xcf\xfa\xed\xfe\x07\0\0\x01"),
        ("win_amd64", b"MZ" + bytes(58) + b"\x40\0\0\0" + b"PE\0\0\x64\x86"),
        ("linux_x86_64", ELF),
    ],
)
def test_a_library_is_of_its_platform(platform: str, data: bytes) -> None:
    assert library_problems(data, platform) == []
    assert library_problems(data, "manylinux_2_17_aarch64")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"elsewhere/a.py": b""}, "got elsewhere/a.py, expected files below fusedops-1.2.3/"),
        ({"fusedops-1.2.3/fusedops/libfusedops-x86_64.so": ELF}, "a built library"),
        ({"fusedops-1.2.3/build/a.o": b""}, "is no source and no part of the package"),
        ({"fusedops-1.2.3/PKG-INFO": METADATA.encode()}, "got no pyproject.toml"),
        ({}, "got no metadata"),
        ({"fusedops-1.2.3/docs/a.md": b"see /home/builder"}, "docs/a.md contains /home/builder"),
    ],
)
def test_a_wrong_source_distribution_is_found(tmp_path: Path, files: dict[str, bytes], problem: str) -> None:
    path = tmp_path / "fusedops-1.2.3.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    problems = sdist_problems(path, "1.2.3", ["/home/builder"])
    assert any(problem in each for each in problems), problems


@pytest.mark.slow
def test_the_source_distribution_and_a_wheel_from_it_pass(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "tools" / "release.py", "--out", tmp_path / "out", "--no-install"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PROBLEM" not in done.stdout
    sums = dict(reversed(line.split()) for line in (tmp_path / "out" / "SHA256SUMS").read_text().splitlines())
    built = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "out").glob("fusedops-*")}
    assert sums == built
    assert len(built) == 2


def test_downloads_are_stated_by_size() -> None:
    assert downloads_text({}) == "nothing: everything is installed"
    assert downloads_text({"tqdm 4": 80_000}) == "1 smaller package: 0 MB"
    assert cuda_warning({"torch 2.13.0+cpu": 190_000_000}) == ""
    sizes = {"torch 2": 900_000_000, "numpy 2": None, "nvidia-cublas 12": 600_000_000}
    assert "gigabytes" in cuda_warning(sizes)
    assert downloads_text(sizes) == (
        "torch 2 (900 MB), nvidia-cublas 12 (600 MB) and 1 smaller package: 1500 MB and 1 of unknown size"
    )

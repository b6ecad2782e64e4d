"""The build hook: with a compiler, without one, and with one that fails."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[3]
# builds a wheel in a process whose modules and commands are limited: `python -m build` would start another one
_BUILD = """
import sys
if {hide_zig}:
    sys.modules["ziglang"] = None
    import importlib.util
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "ziglang" else find(name, *rest)
from hatchling.build import build_wheel, get_requires_for_build_wheel
print(*get_requires_for_build_wheel())
print(build_wheel({out!r}))
"""


def built(out: Path, *, hide_zig: bool = False, **environment: str) -> tuple[str, Path]:
    """Return what an isolated build would install, and the wheel."""
    code = _BUILD.format(out=str(out), hide_zig=hide_zig)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *_, required, name = done.stdout.splitlines()
    return required, out / name


def wheel(out: Path, *, hide_zig: bool = False, **environment: str) -> Path:
    return built(out, hide_zig=hide_zig, **environment)[1]


def why_not(path: Path, folder: Path) -> str:
    """Return why the cpu backend of a wheel is not available."""
    zipfile.ZipFile(path).extractall(folder)
    code = "import fusedops; print(next(info.why for info in fusedops.backends() if info.name == 'cpu'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder), "FUSEDOPS_PLUGINS": "cpu,eager"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def libraries(path: Path) -> list[str]:
    return [name for name in zipfile.ZipFile(path).namelist() if "libfusedops" in name]


@pytest.mark.slow
def test_no_compiler_gives_a_pure_wheel(tmp_path: Path) -> None:
    required, path = built(tmp_path, hide_zig=True, PATH="", CXX="")
    assert required == "ziglang>=0.14"
    assert path.name.endswith("-py3-none-any.whl")
    assert not libraries(path)
    names = zipfile.ZipFile(path).namelist()
    assert "fusedops_cpu/__init__.py" in names
    assert "fusedops_cpu/src/simd/vector.h" in names
    assert why_not(path, tmp_path / "installed").endswith(": no C++ compiler was found when fusedops was installed\n")


def test_a_pure_wheel_that_was_asked_for_needs_no_compiler_and_has_no_reason(tmp_path: Path) -> None:
    required, path = built(tmp_path, hide_zig=True, PATH="", CXX="", FUSEDOPS_CPU_TARGET="none")
    assert required == ""
    assert "fusedops_cpu/no_library.txt" not in zipfile.ZipFile(path).namelist()


@pytest.mark.slow
def test_a_compiler_that_fails_gives_a_pure_wheel(tmp_path: Path) -> None:
    required, path = built(tmp_path, CXX="false")
    assert required == ""
    assert path.name.endswith("-py3-none-any.whl")
    assert not libraries(path)
    assert "false failed when fusedops was installed" in why_not(path, tmp_path / "installed")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a compiler")
def test_a_compiler_gives_a_wheel_of_the_platform(tmp_path: Path) -> None:
    required, path = built(tmp_path)
    assert required == ""
    assert "-py3-none-any" not in path.name
    assert "-py3-none-" in path.name
    assert {name.rpartition("/")[0] for name in libraries(path)} == {"fusedops_cpu"}
    installed = tmp_path / "installed"
    zipfile.ZipFile(path).extractall(installed)
    code = (
        "import fusedops_cpu.launch.library as l; assert l.__file__.startswith({!r}), l.__file__; l.library()\n"
        "import fusedops_cpu.launch.native as n; assert not isinstance(n.loaded(), str), n.loaded()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code.format(str(installed))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs ziglang")
@pytest.mark.parametrize("target", ["linux-aarch64", "windows-x86_64"])
def test_cross_compilation(tmp_path: Path, target: str) -> None:
    path = wheel(tmp_path, FUSEDOPS_CPU_TARGET=target)
    assert libraries(path)
    assert {"linux-aarch64": "manylinux", "windows-x86_64": "win_amd64"}[target] in path.name

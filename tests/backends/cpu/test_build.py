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
from hatchling.build import build_wheel
print(build_wheel({out!r}))
"""


def wheel(out: Path, *, hide_zig: bool = False, **environment: str) -> Path:
    code = _BUILD.format(out=str(out), hide_zig=hide_zig)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out / done.stdout.splitlines()[-1]


def libraries(path: Path) -> list[str]:
    return [name for name in zipfile.ZipFile(path).namelist() if "libfusedops" in name]


def test_no_compiler_gives_a_pure_wheel(tmp_path: Path) -> None:
    path = wheel(tmp_path, hide_zig=True, PATH="", CXX="")
    assert path.name.endswith("-py3-none-any.whl")
    assert not libraries(path)
    names = zipfile.ZipFile(path).namelist()
    assert "fusedops_cpu/__init__.py" in names
    assert "fusedops_cpu/src/simd/vector.h" in names


def test_a_compiler_that_fails_gives_a_pure_wheel(tmp_path: Path) -> None:
    path = wheel(tmp_path, CXX="false")
    assert path.name.endswith("-py3-none-any.whl")
    assert not libraries(path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a compiler")
def test_a_compiler_gives_a_wheel_of_the_platform(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    assert "-py3-none-any" not in path.name
    assert "-py3-none-" in path.name
    assert {name.rpartition("/")[0] for name in libraries(path)} == {"fusedops_cpu"}
    installed = tmp_path / "installed"
    zipfile.ZipFile(path).extractall(installed)
    code = (
        "import fusedops_cpu._library as l; assert l.__file__.startswith({!r}), l.__file__; l.library()\n"
        "import fusedops_cpu._launch as n; assert not isinstance(n.loaded(), str), n.loaded()"
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

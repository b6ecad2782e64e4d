"""The compiled library under AddressSanitizer and UndefinedBehaviorSanitizer: calls, memory safety and the fuzzer.

A copy of the package with the library built so is before it on the path, in processes of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

from fusedops_cpu import _library
from fusedops_cpu._structs import number_of_header

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="needs g++ on Linux"),
]
FLAGS = (
    *("-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-Wno-psabi"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
)
TESTS = "tests/backends/cpu/test_calls.py", "tests/backends/cpu/test_remembered_calls.py"
SITUATIONS = ("freed", "swapped", "held", "meta")
_PLANTED = """
#include <cstdio>
#include <cstdlib>
extern "C" int planted(char* p, long long at) { return reinterpret_cast<int*>(p)[at]; }
__attribute__((constructor)) static void loaded() { std::fclose(std::fopen(std::getenv("LOADED"), "w")); }
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which the package has the library built with both sanitizers."""
    folder, original = tmp_path_factory.mktemp("sanitized"), Path(_library.__file__).parent
    name = _library.library_path().name
    shutil.copytree(original, folder / "fusedops_cpu", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    level = name.removeprefix("libfusedops_cpu-").removesuffix(".so")
    march = [f"-march={level}"] if level.startswith("x86-64") else []
    planted = folder / "planted.cpp"
    planted.write_text(_PLANTED)
    sources = sorted(map(str, (*(original / "src").rglob("*.cpp"), planted)))
    number = f"-DFUSEDOPS_HEADER={number_of_header((original / 'src' / 'api.h').read_text())}"
    subprocess.run(
        ["g++", *FLAGS, number, *march, f"-I{original / 'src'}", *sources, "-o", str(folder / "fusedops_cpu" / name)],
        check=True,
    )
    runtimes = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Python itself leaks at its end
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    options |= {"LOADED": str(folder / "loaded"), "LD_PRELOAD": " ".join(runtimes), "PYTHONPATH": path}
    return {**os.environ, **options}


def run(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "Sanitizer" not in done.stderr
    Path(environment["LOADED"]).unlink()  # which the library wrote
    return done.stdout


_READ = """
import ctypes, sys, torch
from fusedops_cpu import _library
x = torch.zeros(1000)
ctypes.CDLL(str(_library.library().path)).planted(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(int(sys.argv[1])))
"""


def test_a_read_after_a_tensor_is_found(environment: dict[str, str]) -> None:
    run(environment, "-c", _READ, "999")
    done = subprocess.run(
        [sys.executable, "-c", _READ, "1000"], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode
    assert "heap-buffer-overflow" in done.stderr


@pytest.mark.parametrize("file", [*TESTS, "tests/dispatch/test_memory_safety.py"])
def test_tests(environment: dict[str, str], file: str) -> None:
    out = run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "not long", file)
    assert re.search(r"\d+ passed", out)


def test_writers(environment: dict[str, str]) -> None:
    """Another thread writes what selects memory; memory that was not written selects what is far away."""
    environment = {**environment, "ASAN_OPTIONS": f"{environment['ASAN_OPTIONS']}:max_malloc_fill_size={2**30}"}
    out = run(environment, "tests/backends/cpu/test_writers.py", "3")
    assert out.endswith("done\n")


def test_the_fuzzer(environment: dict[str, str]) -> None:
    """300 calls of each op, each in a situation in which memory changes; every fifth integer has a negative bit."""
    wanted = [part for name in SITUATIONS for part in ("--situation", name)]
    out = run(environment, "-m", "tests.fuzz", "--backend", "cpu", "--seed", "31", "--calls", "300", *wanted)
    assert "0 wrong, 0 crash, 0 hang" in out

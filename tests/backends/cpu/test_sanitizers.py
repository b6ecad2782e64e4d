"""The compiled library under sanitizers: the conformance kit, calls, memory safety and the fuzzer.

A copy of the package with the library built so is before it on the path, in processes of their own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_values import LEVELS, RUNS, X86
from repository import ROOT

from fusedops_cpu.launch import library
from fusedops_cpu.launch.structs import number_of_header

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="needs g++ on Linux"),
]
FLAGS = (
    *("-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-Wno-psabi"),
    *("-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    "-Wno-tsan",  # std::atomic_thread_fence, which <thread> has and nothing here calls
)
RUNTIMES = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
#: Of the kit, those whose calls differ in what a kernel reads, writes and shares.
CHECKS = ("calls", "dtypes", "empty", "float64", "freed", "masked_rows", "needs")
CHECKS += ("sizes", "special", "strides", "threads")
NATIVE = RUNS[-1] if RUNS else "DEFAULT"
TESTS = "tests/backends/cpu/test_calls.py", "tests/backends/cpu/test_remembered_calls.py"
SITUATIONS = ("freed", "swapped", "held", "meta")
# threads that the sanitizer sees, unlike those of OpenMP, and a fault for each sanitizer
_PLANTED = """
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
typedef void (*Body)(int64_t begin, int64_t end, void* context);
extern "C" int planted_run(int64_t begin, int64_t end, int64_t, Body body, void* context) {
  std::vector<std::thread> pool;
  for (int64_t i = begin; i < end; i++) pool.emplace_back(body, i, i + 1, context);
  for (auto& thread : pool) thread.join();
  return 0;
}
extern "C" int planted_count(uint32_t* count) { return *count = 3, 0; }
extern "C" int planted(char* p, long long at) { return reinterpret_cast<int*>(p)[at]; }
extern "C" int planted_race(int64_t count) {
  int sum = 0;
  planted_run(0, count, 1, [](int64_t, int64_t, void* sum) { ++*(int*)sum; }, &sum);
  return sum;
}
__attribute__((constructor)) static void loaded() { std::fclose(std::fopen(std::getenv("LOADED"), "w")); }
"""


@pytest.fixture(scope="module")
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which the package has the library of a capability, built with sanitizers."""
    sanitizers, capability = request.param
    folder, original = tmp_path_factory.mktemp("sanitized"), Path(library.__file__).parents[1]
    shutil.copytree(original, folder / "fusedops_cpu", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    name = f"libfusedops_cpu-{LEVELS[capability]}.so" if X86 else library.library_path().name
    march = [f"-march={LEVELS[capability]}"] if X86 else []
    planted = folder / "planted.cpp"
    planted.write_text(_PLANTED)
    sources = sorted(map(str, (*(original / "src").rglob("*.cpp"), planted)))
    number = number_of_header((original / "src" / "api.h").read_text())
    options = [f"-fsanitize={sanitizers}", f"-DFUSEDOPS_HEADER={number}", *march, f"-I{original / 'src'}"]
    subprocess.run(["g++", *FLAGS, *options, *sources, "-o", str(folder / "fusedops_cpu" / name)], check=True)
    runtimes = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in RUNTIMES[sanitizers]
    ]
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Python itself leaks at its end
    given = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    given |= {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1", "ATEN_CPU_CAPABILITY": capability.lower()}
    given |= {"LOADED": str(folder / "loaded"), "LD_PRELOAD": " ".join(runtimes), "PYTHONPATH": path}
    return {**os.environ, **given, "OMP_NUM_THREADS": "1"}


def sanitized(*params: tuple[str, str]) -> pytest.MarkDecorator:
    """Parametrize ``environment`` by sanitizers and the capability whose instructions the library has."""
    return pytest.mark.parametrize("environment", params, indirect=True, scope="module", ids=" ".join)


with_address = sanitized(("address,undefined", NATIVE))


def run(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "Sanitizer" not in done.stderr
    Path(environment["LOADED"]).unlink()  # which the library wrote
    return done.stdout


def report(environment: dict[str, str], *arguments: str) -> str:
    """Return what a program that the sanitizer ends prints."""
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode
    return done.stderr


_LIBRARY = """
import ctypes, json, sys, torch
from fusedops_cpu.launch import library
library = ctypes.CDLL(str(library.library().path))
"""
_READ = f"""{_LIBRARY}
x = torch.zeros(1000)
library.planted(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(int(sys.argv[1])))
"""
_RACE = f"{_LIBRARY}library.planted_race(ctypes.c_int64(int(sys.argv[1])))"
_KIT = f"""{_LIBRARY}
from fusedops import testing
pool = library.planted_run, library.planted_count
library.fusedops_use_threads(*(ctypes.cast(each, ctypes.c_void_p) for each in pool))
torch.set_num_threads(1)
every = testing.checks("cpu", brief=sys.argv[1] == "brief")
checks = [each for each in every if each.name in {CHECKS}]
results = [check.run() for check in checks]
failures = [str(result) for result in results if result.failures]
print(json.dumps({{"failures": failures, "cases": sum(result.cases for result in results)}}))
"""


@with_address
def test_a_read_after_a_tensor_is_found(environment: dict[str, str]) -> None:
    run(environment, "-c", _READ, "999")
    assert "heap-buffer-overflow" in report(environment, "-c", _READ, "1000")


@sanitized(("thread", NATIVE))
def test_a_number_that_two_threads_write_is_found(environment: dict[str, str]) -> None:
    run(environment, "-c", _RACE, "1")
    assert "data race" in report(environment, "-c", _RACE, "2")


@sanitized(*((sanitizers, capability) for sanitizers in RUNTIMES for capability in RUNS or ["DEFAULT"]))
def test_the_kit(environment: dict[str, str]) -> None:
    """Three threads run each call. A library for fewer instructions is of the same source: it gets fewer calls."""
    fewer = environment["ATEN_CPU_CAPABILITY"] != NATIVE.lower()
    results = json.loads(run(environment, "-c", _KIT, "brief" if fewer else "all"))
    assert not results["failures"]
    assert results["cases"] > 1000


@with_address
@pytest.mark.parametrize("file", [*TESTS, "tests/dispatch/test_memory_safety.py"])
def test_tests(environment: dict[str, str], file: str) -> None:
    out = run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "not long", file)
    assert re.search(r"\d+ passed", out)


@with_address
def test_writers(environment: dict[str, str]) -> None:
    """Another thread writes what selects memory; memory that was not written selects what is far away."""
    environment = {**environment, "ASAN_OPTIONS": f"{environment['ASAN_OPTIONS']}:max_malloc_fill_size={2**30}"}
    out = run(environment, "tests/backends/cpu/test_writers.py", "3")
    assert out.endswith("done\n")


@with_address
def test_the_fuzzer(environment: dict[str, str]) -> None:
    """300 calls of each op, each in a situation in which memory changes; every fifth integer has a negative bit."""
    wanted = [part for name in SITUATIONS for part in ("--situation", name)]
    out = run(environment, "-m", "tests.fuzz", "--backend", "cpu", "--seed", "31", "--calls", "300", *wanted)
    assert "0 wrong, 0 crash, 0 hang" in out

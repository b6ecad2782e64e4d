"""The library file: its selection, and what happens where there is none."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fusedops
import fusedops_cpu
from fusedops_cpu import _library
from fusedops_cpu._structs import kinds_of_functions

_KIT = """
import json
from fusedops import testing
from fusedops_cpu._library import library_path
results = [check.run() for check in testing.checks("cpu")]
failures = [str(result) for result in results if result.failures]
print(json.dumps([library_path().name, failures, sum(result.cases for result in results)]))
"""
LEVELS = {"DEFAULT": "x86-64-v2", "AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}
X86 = platform.machine().lower() in ("x86_64", "amd64")
# the instruction sets that this processor runs
RUNS = [*LEVELS][: 1 + [*LEVELS].index(torch.backends.cpu.get_cpu_capability())] if X86 else []


def probe_again() -> None:
    """Replace the backend's record by a new one; the fixture that isolates each test restores the old one."""
    fusedops.unregister("cpu")
    fusedops.register(fusedops_cpu)


def info() -> fusedops.BackendInfo:
    return next(info for info in fusedops.backends() if info.name == "cpu")


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "library_path", lambda: Path("none.so"))
    probe_again()


@pytest.fixture
def loads_again() -> Iterator[None]:
    _library.library.cache_clear()
    yield
    _library.library.cache_clear()


@pytest.mark.usefixtures("on_cpu")
def test_it_comes_before_eager() -> None:
    with fusedops.use("auto"):
        assert fusedops.explain("bias_gelu", torch.ones(3)).backend == "cpu"
        assert fusedops.explain("bias_gelu", torch.ones(3).double()).backend == "eager"


@pytest.mark.skipif(not X86, reason="needs x86-64")
@pytest.mark.parametrize("capability", LEVELS)
def test_the_instruction_set_follows_torch(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert LEVELS[capability] in _library.library_path().name


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("capability", RUNS)
def test_the_kit_passes_on_each_instruction_set(capability: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KIT],
        capture_output=True,
        text=True,
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability.lower(), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    name, failures, cases = json.loads(done.stdout.splitlines()[-1])
    assert LEVELS[capability] in name
    assert not failures
    assert cases > 1500  # at the kit's default size


@pytest.mark.usefixtures("no_library")
def test_without_a_library_the_backend_is_unavailable() -> None:
    cpu = info()
    assert cpu.state == "unavailable"
    assert "none.so" in cpu.why
    assert "install g++ or clang++" in cpu.fix


@pytest.mark.usefixtures("no_library")
def test_without_a_library_there_is_no_warning_unless_a_policy_names_the_backend() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusedops.bias_gelu(torch.ones(3))
    with pytest.warns(fusedops.FallbackWarning, match=r"none\.so"):
        fusedops.bias_gelu(torch.ones(3), backend="cpu")


@pytest.mark.usefixtures("on_cpu", "loads_again")
def test_a_torch_without_its_thread_pool_exported_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "_TORCH_LIBRARIES", dict.fromkeys(["linux", "darwin", "win32"], "no.so"))
    probe_again()
    cpu = info()
    assert cpu.state == "unavailable"
    assert "does not load" in cpu.why


@pytest.mark.usefixtures("on_cpu", "loads_again")
def test_a_library_of_another_header_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "number_of_header", len)
    probe_again()
    cpu = info()
    assert cpu.state == "unavailable"
    assert "compiled with another src/api.h" in cpu.why
    assert "install fusedops from source again" in cpu.fix


def test_the_kinds_of_a_struct() -> None:
    header = """
    struct Inner {
      double scale;  // a comment; with a semicolon
      int64_t* counts() const { return (int64_t*)(this + 1); }
    };
    struct Outer {
      const void *x, *y;
      const int64_t* z;
      void* out;
      Inner settings, each[2];
      int64_t
          rows;
    };
    FUSEDOPS_EXPORT int fusedops_outer(const fusedops::Outer* call);
    """.replace("\n    ", "\n")
    assert kinds_of_functions(header) == {"outer": b"rrrwdddq"}
    with pytest.raises(ValueError, match="a field of type float in Outer"):
        kinds_of_functions(header.replace("int64_t\n", "float\n"))
    with pytest.raises(ValueError, match="got 'Inner settings, 2' in Outer"):
        kinds_of_functions(header.replace("each[2]", "2"))


def test_no_other_library_is_needed() -> None:
    """No OpenMP and no C++ runtime: only the C library."""
    libraries = list(Path(fusedops_cpu.__file__).parent.glob("libfusedops_cpu-*.so"))
    if not libraries or sys.platform != "linux":
        pytest.skip("needs libfusedops_cpu on Linux, which an install builds where there is a C++ compiler")
    for library in libraries:
        content = library.read_bytes()
        assert b"libgomp" not in content
        assert b"libstdc++" not in content
    # 3.3 MiB: attention in tiles is 0.4 of them
    assert sum(library.stat().st_size for library in libraries) < 14 * 2**18

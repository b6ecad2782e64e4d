"""The library file: its selection, and what happens where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_values import LEVELS, RUNS, X86

import fusedops
import fusedops_cpu
from fusedops_cpu.launch import library
from fusedops_cpu.launch.struct_call import LibraryCall
from fusedops_cpu.launch.structs import kinds_of_functions

_KIT = """
import json
from fusedops import testing
from fusedops_cpu.launch.library import library_path
results = [check.run() for check in testing.checks("cpu")]
failures = [str(result) for result in results if result.failures]
print(json.dumps([library_path().name, failures, sum(result.cases for result in results)]))
"""
X = torch.ones(1)
# fields of which one does not fit the others
MISFITS: dict[str, tuple[str, tuple[Any, ...], int]] = {
    "no x": ("gelu_forward", (None, None, X, 0, 1, 0, 1), 0),
    "a residual without s": ("norm_forward", (X, X, None, None, X, *[None] * 3, 0, 0, 0, 1, 1, 0, 1e-5, 0.0), 0),
    "an unknown activation": ("gated_forward", (X, X, X, 0, 1, 1, 3, 1, 1, 0.0, 1.0, 0.0), 0),
    "an unknown reduction": (
        "cross_entropy_forward",
        (X, torch.zeros(1, dtype=torch.int64), X, None, 0, 1, 1, 1, 0, 1, -100, 4, 0.0, 0.0, 0.0, 1.0),
        0,
    ),
    "more pairs than the row has": ("rotary", (X, X, 0, 0, 1, 1, 2, 2, *[0] * 5, 1.0, *[None, None, *[0] * 9] * 2), 0),
    "no tensor to rotate": (
        "rotary",
        (X, X, 0, 0, 1, 1, 2, 1, *[0] * 5, 1.0, *[None, None, *[0] * 9], None, X, 0, 1, *[2] * 7),
        0,
    ),
    "a mask that does not broadcast": (
        "softmax_forward",
        (X, torch.ones(2, dtype=torch.uint8), X, 0, 1, 1, 1, 0, 1.0, 2, 2, 1, 1, 1, 2, 2, 1),
        6,
    ),
}


def probe_again() -> None:
    """Replace the backend's record by a new one; the fixture that isolates each test restores the old one."""
    fusedops.unregister("cpu")
    fusedops.register(fusedops_cpu)


def info() -> fusedops.BackendInfo:
    return next(info for info in fusedops.backends() if info.name == "cpu")


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library_path", lambda: Path("none.so"))
    probe_again()


@pytest.fixture
def loads_again() -> Iterator[None]:
    library.library.cache_clear()
    yield
    library.library.cache_clear()


@pytest.mark.usefixtures("on_cpu")
def test_it_comes_before_eager() -> None:
    with fusedops.use("auto"):
        assert fusedops.explain("bias_gelu", torch.ones(3)).backend == "cpu"
        assert fusedops.explain("bias_gelu", torch.ones(3).double()).backend == "eager"


@pytest.mark.skipif(not X86, reason="needs x86-64")
@pytest.mark.parametrize("capability", LEVELS)
def test_the_instruction_set_follows_torch(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert LEVELS[capability] in library.library_path().name


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


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", MISFITS)
def test_fields_that_do_not_fit_each_other_are_an_error(name: str) -> None:
    key, fields, after = MISFITS[name]
    function = getattr(library.library(), key)
    function = function[after] if isinstance(function, list) else function
    assert len(fields) == len(function.kinds)
    with pytest.raises(fusedops.InvalidInputError, match="shapes that do not fit each other"):
        function.run(LibraryCall(function, fields, X))


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
    monkeypatch.setattr(library, "_TORCH_LIBRARIES", dict.fromkeys(["linux", "darwin", "win32"], "no.so"))
    probe_again()
    cpu = info()
    assert cpu.state == "unavailable"
    assert "does not load" in cpu.why


@pytest.mark.usefixtures("on_cpu", "loads_again")
def test_a_library_of_another_header_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "number_of_header", len)
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
    for path in libraries:
        content = path.read_bytes()
        assert b"libgomp" not in content
        assert b"libstdc++" not in content
    # 4.96 MB: attention in tiles is 0.4 of them, keys in pages 0.3, packed weights in the formats of the Hub 0.25
    assert sum(path.stat().st_size for path in libraries) < 4_970_000

"""Checks that remember the calls they took: fusedops/_native."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT
from torch import Tensor

import fusedops
from fusedops import _native
from fusedops._plugins.registry import OWN_DISTRIBUTION, registry
from fusedops.constraints import Constraint, Rank, compile_check
from fusedops.ops import OPS

needs_library = pytest.mark.skipif(isinstance(_native.library(), str), reason="needs the core's compiled library")


class Check:
    """A check that counts its calls. It takes all but "refused"; "error" makes it raise."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any) -> object:
        self.calls += 1
        if "error" in [arg for arg in args if isinstance(arg, str)]:
            raise TypeError("no")
        return "violated" if "refused" in [arg for arg in args if isinstance(arg, str)] else None


@pytest.fixture
def check() -> Check:
    return Check()


class Subclass(Tensor):
    pass


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype of torch's
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


x = torch.ones(2, 3)
ALIKE: dict[str, tuple[Any, Any]] = {
    "sizes": (x, torch.zeros(2, 3)),
    "requires_grad": (x, torch.zeros(2, 3, requires_grad=True)),
    "parameters": (torch.nn.Parameter(x), torch.nn.Parameter(torch.zeros(2, 3))),
    "no dims": (torch.tensor(1.0), torch.tensor(2.0)),
    "empty": (torch.ones(0, 3), torch.ones(0, 3)),
    "None": (None, None),
    "floats": (float("1e300"), float("1e300")),
    "NaN": (float("nan"), float("nan")),
    "integers": (10**30, int("1" + "0" * 30)),
    "texts": ("upper_left", "_".join(["upper", "left"])),
    "tuples": ((1, 2.5, None, True), (1, 2.5, None, True)),
    "dtypes": (torch.float16, torch.half),
}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "sizes": (x, torch.ones(3, 2)),
    "dims": (x, torch.ones(2, 3, 1)),
    "strides": (x, torch.ones(3, 2).t()),
    "dtype": (x, torch.ones(2, 3, dtype=torch.float16)),
    "device": (x, torch.ones(2, 3, device="meta")),
    "parameter": (x, torch.nn.Parameter(x)),
    "tensor and None": (x, None),
    "tensor and number": (torch.tensor(1.0), 1.0),
    "bool and int": (True, 1),
    "int and float": (1, 1.0),
    "numbers": (0.1, 0.2),
    "zeros": (0.0, -0.0),
    "zeros in tuples": ((0.0,), (-0.0,)),
    "texts": ("a", "b"),
    "tuple's types": ((1, 0), (True, False)),
    "tuple's lengths": ((1, 2), (1, 2, 3)),
    "dtypes": (torch.float16, torch.bfloat16),
}
NEVER: dict[str, Callable[[], Any]] = {
    "list": lambda: [1],
    "tuple of lists": lambda: ([1],),
    "subclass of a tensor": lambda: torch.ones(2).as_subclass(Subclass),
    "subclass of int": lambda: type("Int", (int,), {})(3),
    "sparse": lambda: torch.ones(2, 2).to_sparse(),
    "nested": nested,
    "nine dims": lambda: torch.ones([1] * 9),
    "object": object,
    "spec": lambda: fusedops.TensorSpec((2,)),
}


@needs_library
@pytest.mark.parametrize("name", ALIKE)
def test_a_call_like_an_earlier_one_is_not_checked(name: str, check: Check) -> None:
    remembered = _native.remembered(check)
    first, second = ALIKE[name]
    assert remembered(x, first) is None
    assert remembered(x, second) is None
    assert check.calls == 1


@needs_library
@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("turned", [False, True])
def test_another_call_is_checked(name: str, turned: bool, check: Check) -> None:
    remembered = _native.remembered(check)
    first, second = reversed(DIFFERENT[name]) if turned else DIFFERENT[name]
    assert remembered(first) is None
    assert remembered(second) is None
    assert check.calls == 2
    assert remembered(first, first) is None  # another number of arguments
    assert check.calls == 3


@needs_library
@pytest.mark.parametrize("name", NEVER)
def test_what_may_change_is_checked_each_time(name: str, check: Check) -> None:
    remembered = _native.remembered(check)
    value = NEVER[name]()
    for calls in (1, 2, 3):
        assert remembered(x, value) is None
        assert check.calls == calls


@needs_library
def test_a_refusal_and_an_error_are_not_remembered(check: Check) -> None:
    remembered = _native.remembered(check)
    for calls in (1, 2):
        assert remembered(x, "refused") == "violated"
        assert check.calls == calls
    for calls in (3, 4):
        with pytest.raises(TypeError, match="no"):
            remembered(x, "error")
        assert check.calls == calls
    remembered(*[None] * 17)
    remembered(*[None] * 17)
    assert check.calls == 6


@needs_library
def test_the_newest_eight_calls_are_remembered(check: Check) -> None:
    remembered = _native.remembered(check)
    for size in range(9):
        remembered(torch.empty(size))
    for size in range(8, 0, -1):
        remembered(torch.empty(size))
    assert check.calls == 9
    remembered(torch.empty(0))
    assert check.calls == 10


@needs_library
def test_nothing_is_kept_for_longer_than_needed() -> None:
    check = Check()
    remembered = _native.remembered(check)
    text, tensor, alive = "a text " * 3, torch.ones(2), weakref.ref(check)
    counts = sys.getrefcount(text), sys.getrefcount(tensor)
    for size in range(100):  # from the ninth on, each takes the place of an earlier one
        remembered(torch.empty(size), text, None)
        remembered(tensor, text, (1, None))
        remembered(tensor, text, [])
    assert sys.getrefcount(tensor) == counts[1]
    assert sys.getrefcount(text) <= counts[0] + 8
    del remembered, check
    gc.collect()
    assert alive() is None
    assert sys.getrefcount(text) == counts[0]


@needs_library
def test_threads() -> None:
    remembered = _native.remembered(lambda *args: "odd" if args[0].shape[0] % 2 else None)
    wrong: list[int] = []

    def work(offset: int) -> None:
        for call in range(2000):
            size = (call * 7 + offset) % 40
            if (remembered(torch.empty(size), str(size), (size, 0)) is None) != (size % 2 == 0):
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Positive(Constraint):
    """The first element is positive: a value, which a call like an earlier one need not have."""

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name}[0] > 0"


def test_a_constraint_that_reads_values_is_tested_at_each_call() -> None:
    check = compile_check(("x",), [Rank("x", 1)] * 8 + [Positive("x")])
    y = torch.ones(2)
    assert check(y) is None
    y[0] = -1
    assert isinstance(check(y), Positive)


def test_without_the_library_the_check_is_the_function_itself(monkeypatch: pytest.MonkeyPatch, check: Check) -> None:
    monkeypatch.setattr(_native, "library", lambda: "it is not here")
    assert _native.remembered(check) is check


def test_a_file_that_does_not_load_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "library").write_bytes(b"no library")
    monkeypatch.setattr(_native, "library_path", lambda: tmp_path / "library")
    assert "does not load" in _native.library.__wrapped__()
    monkeypatch.setattr(_native, "library_path", lambda: tmp_path / "none")
    assert _native.library.__wrapped__() == "this installation has no compiled library none"


def test_every_constraint_of_the_package_reads_metadata_alone() -> None:
    own = [record.backend for record in registry.records() if record.distribution == OWN_DISTRIBUTION]
    kernels = [kernel for backend in own if backend is not None for kernel in backend.kernels]
    constraints = [each for op in OPS.values() for each in op.conditions]
    constraints += [each for kernel in kernels for each in kernel.constraints]
    assert {type(each).__name__ for each in constraints if not each.reads_metadata_only} == set()


_TESTS = ("test_remembered.py", "test_packed_call.py", "test_within.py")
_SANITIZED = """
import pathlib, sys, pytest
from fusedops import _native
_native.library_path = lambda: pathlib.Path(sys.argv[1])
_native.library.cache_clear()
assert not isinstance(_native.library(), str), _native.library()
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "not sanitizers", *sys.argv[2:]]))
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="needs g++ on Linux")
def test_sanitizers(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    sources = sorted(Path(_native.__file__).parent.glob("*.cpp"))
    flags = [
        "-std=c++17",
        "-g",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsanitize=address,undefined",
        "-fPIC",
        "-shared",
    ]
    subprocess.run(["g++", *flags, "-o", str(library), *map(str, sources)], check=True)
    runtimes = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    # Python itself leaks at its end
    environment = {**os.environ, "LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [
        sys.executable,
        "-c",
        _SANITIZED,
        str(library),
        *(str(Path(__file__).with_name(name)) for name in _TESTS),
    ]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]

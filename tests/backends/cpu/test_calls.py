"""Launchers whose calls of the library are remembered (``src/launch.cpp``), and the same calls made in Python."""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fusedops
from fusedops_cpu.launch import native
from fusedops_cpu.launch.calls import prepared, results_of
from fusedops_cpu.launch.struct_call import LibraryCall, library_function

needs_memory = pytest.mark.skipif(isinstance(native.loaded(), str), reason="needs launchers that remember calls")

SCALED = struct.Struct("2P2qd")


class Library:
    """A C function that multiplies ``count`` float32 numbers of x by ``scale``, into y; a scale of 13 fails."""

    def __init__(self) -> None:
        self.calls, self.failing = 0, False
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._scaled)
        self.scaled = library_function(self._callback, b"rwqqd", lambda status: ValueError(f"status {status}"))
        self._callback.argtypes = [ctypes.c_void_p]  # bytes pass as the address of the struct

    def _scaled(self, address: int) -> int:
        self.calls += 1
        x, y, count, skipped, scale = SCALED.unpack(ctypes.string_at(address, SCALED.size))
        if scale == 13.0 or self.failing:
            return 7
        source = (ctypes.c_float * count).from_address(x + 4 * skipped)
        out = (ctypes.c_float * count).from_address(y)
        out[:] = [scale * value for value in source]
        return 0


class Scaled:
    """The launcher: ``scale * x`` beside None and x. It counts its calls."""

    def __init__(self) -> None:
        self.library, self.calls = Library(), 0

    def __call__(self, x: Tensor, scale: float, *rest: Any) -> Any:
        self.calls += 1
        if not x.numel():
            return torch.empty_like(x), None, x
        dense = x if x.is_contiguous() and not x.is_neg() else x.resolve_neg().contiguous()
        y = torch.empty_like(dense)
        return LibraryCall(self.library.scaled, (dense, y, x.numel(), 0, scale), (y, None, x))


@pytest.fixture
def launcher() -> Scaled:
    return Scaled()


@pytest.fixture(params=[pytest.param("remembered", marks=needs_memory), "in Python"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`prepared`, with a memory of calls and without it."""
    if request.param == "in Python":
        monkeypatch.setattr(native, "loaded", lambda: "it is not here")
    return prepared


def check(results: Any, x: Tensor, scale: float) -> None:
    y, nothing, same = results
    assert nothing is None
    assert same is x
    assert torch.equal(y, x * scale)
    assert y.is_contiguous()


def test_results_and_their_values(run: Callable[..., Any], launcher: Scaled) -> None:
    scaled = run(launcher)
    kept = []
    for size in (3, 5, 3, 3, 0, 0):
        x = torch.randn(2, size)
        kept.append(scaled(x, 2.0))
        check(kept[-1], x, 2.0)
    addresses = [y.data_ptr() for y, *_ in kept if y.numel()]
    assert len({*addresses}) == len(addresses)
    assert launcher.library.calls == 4


class Subclass(Tensor):
    pass


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype of torch's
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


X = torch.ones(2, 3)
ALIKE: dict[str, tuple[Any, Any]] = {
    "sizes": (X, torch.zeros(2, 3)),
    "requires_grad": (X, torch.zeros(2, 3, requires_grad=True)),
    "parameters": (torch.nn.Parameter(X), torch.nn.Parameter(torch.zeros(2, 3))),
    "no dims": (torch.tensor(1.0), torch.tensor(2.0)),
    "None": (None, None),
    "NaN": (float("nan"), float("nan")),
    "integers": (10**30, int("1" + "0" * 30)),
    "texts": ("upper_left", "_".join(["upper", "left"])),
    "tuples": ((1, 2.5, None, True), (1, 2.5, None, True)),
}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "sizes": (X, torch.ones(3, 2)),
    "dims": (X, torch.ones(2, 3, 1)),
    "strides": (X, torch.ones(3, 2).t()),
    "dtype": (X, torch.ones(2, 3, dtype=torch.float16)),
    "device": (X, torch.ones(2, 3, device="meta")),
    "parameter": (X, torch.nn.Parameter(X)),
    "tensor and None": (X, None),
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
}


@needs_memory
@pytest.mark.parametrize("name", ALIKE)
def test_a_call_like_an_earlier_one_does_not_run_the_launcher(name: str, launcher: Scaled) -> None:
    scaled = prepared(launcher)
    for rest in (*ALIKE[name], *ALIKE[name]):
        x = torch.randn(2, 3)
        check(scaled(x, 2.0, rest), x, 2.0)
    assert launcher.calls == 1
    assert launcher.library.calls == 4


@needs_memory
@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("turned", [False, True])
def test_another_call_runs_it(name: str, turned: bool, launcher: Scaled) -> None:
    scaled = prepared(launcher)
    first, second = reversed(DIFFERENT[name]) if turned else DIFFERENT[name]
    x = torch.randn(4)
    for calls, rest in enumerate([(first,), (second,), (first, first)], 1):
        check(scaled(x, 2.0, *rest), x, 2.0)
        assert launcher.calls == calls


@needs_memory
@pytest.mark.parametrize("name", NEVER)
def test_arguments_that_are_not_compared_run_it_each_time(name: str, launcher: Scaled) -> None:
    scaled, value = prepared(launcher), NEVER[name]()
    for calls in (1, 2, 3):
        check(scaled(X, 2.0, value), X, 2.0)
        assert launcher.calls == calls
    for calls in (4, 5):
        check(scaled(X, 2.0, *[None] * 23), X, 2.0)  # 25 arguments
        assert launcher.calls == calls


@pytest.mark.parametrize("scale", [2.0, 3.0])
def test_what_is_read_is_a_copy_and_no_argument(scale: float, run: Callable[..., Any], launcher: Scaled) -> None:
    scaled = run(launcher)
    scaled(torch.randn(2, 3), 2.0)
    for make in (torch.randn(3, 2).t, lambda: torch._neg_view(torch.randn(2, 3))):  # pyright: ignore[reportPrivateUsage]
        for _ in range(2):
            calls, x = launcher.calls, make()
            check(scaled(x, scale), x, scale)
            assert launcher.calls == calls + 1 or x.is_neg()  # its metadata is of a call that was remembered
            check(scaled(x, scale), x, scale)


def test_one_tensor_for_two_parameters_and_then_two_tensors(run: Callable[..., Any]) -> None:
    def added(address: int) -> int:
        x, y, out, count = struct.unpack("3Pq", ctypes.string_at(address, 32))
        one, other = ((ctypes.c_float * count).from_address(each) for each in (x, y))
        (ctypes.c_float * count).from_address(out)[:] = [a + b for a, b in zip(one, other)]
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(added)
    function = library_function(callback, b"rrwq", lambda status: ValueError(str(status)))
    callback.argtypes = [ctypes.c_void_p]

    def launch(x: Tensor, y: Tensor) -> Any:
        out = torch.empty_like(x)
        return LibraryCall(function, (x, y, out, x.numel()), (out, x))

    add = run(launch)
    same, one, other = torch.randn(5), torch.randn(5), torch.randn(5)
    for x, y in [(same, same), (one, other), (same, same), (other, one)]:
        out, first = add(x, y)
        assert first is x
        assert torch.equal(out, x + y)


def test_a_status_is_raised_by_every_call(run: Callable[..., Any], launcher: Scaled) -> None:
    scaled, x = run(launcher), torch.ones(2)
    for _ in range(2):
        with pytest.raises(ValueError, match="status 7"):
            scaled(x, 13.0)
        check(scaled(x, 2.0), x, 2.0)
    launcher.library.failing = True
    with pytest.raises(ValueError, match="status 7"):
        scaled(x, 2.0)


def each_time(library: Library) -> dict[str, Callable[[Tensor], Any]]:
    """Return launchers whose calls cannot run without them: what they read or return is made by them."""

    def scaled(x: Tensor, results: Callable[[Tensor], Any], written: Tensor | None = None) -> LibraryCall:
        y = torch.empty_like(x) if written is None else written
        return LibraryCall(library.scaled, (x, y, x.numel(), 0, 2.0), results(y))

    return {
        "a copy is read": lambda x: scaled(x.clone(), lambda y: (y,)),
        "a copy is read and returned": lambda x: (lambda copy: scaled(copy, lambda y: (y, copy)))(x.clone()),
        "a tensor is made by torch": lambda x: scaled(x, lambda y: (y, x + 1)),
        "one result twice": lambda x: scaled(x, lambda y: (y, y)),
        "a view of a result": lambda x: scaled(x, lambda y: (y, y.view(-1))),
        "what is written is no result": lambda x: scaled(x, lambda _: (x,)),
        "an argument is written": lambda x: scaled(x, lambda _: (x,), x),
        "another device": lambda x: scaled(x, lambda y: (y, torch.empty(2, device="meta"))),
        "thirteen results": lambda x: scaled(x, lambda y: (y, *[None] * 12)),
    }


@needs_memory
@pytest.mark.parametrize("name", each_time(Library()))
def test_what_is_no_argument_and_no_result_is_made_each_time(name: str) -> None:
    calls, launch = 0, each_time(library := Library())[name]

    def launcher(x: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return launch(x)

    scaled = prepared(launcher)
    for expected in (1, 2, 3):
        x = torch.randn(4)
        wanted = results_of(launch(x.clone()))
        results = scaled(x)
        assert calls == expected
        for got, want in zip(results, wanted, strict=True):
            assert got is None or got.is_meta or torch.equal(got, want)
    assert library.calls == 6


@pytest.mark.parametrize("inside", [False, True])
def test_results_of_other_shapes_and_dtypes(inside: bool, run: Callable[..., Any]) -> None:
    library = Library()

    def second_half(x: Tensor) -> LibraryCall:
        half = x.numel() // 2
        y, empty = x.new_empty(half), x.new_empty((0, 2), dtype=torch.bfloat16)
        return LibraryCall(library.scaled, ((x, 4 * half), (y, 0), half, 0, 3.0), (y, empty))

    scaled = run(second_half)
    scaled(torch.randn(2, 3))
    x = torch.randn(2, 3)
    with torch.inference_mode(inside):  # it is of the call
        y, empty = scaled(x)
    assert y.is_inference() is inside
    assert torch.equal(y, 3 * x.flatten()[3:])
    assert (empty.shape, empty.stride(), empty.dtype) == ((0, 2), (2, 1), torch.bfloat16)


WRONG: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "too few fields": lambda x, y: (x, y, 2, 0),
    "too many": lambda x, y: (x, y, 2, 0, 1.0, 1),
    "a text": lambda x, y: (x, y, "2", 0, 1.0),
    "a number for an integer": lambda x, y: (x, y, 2.5, 0, 1.0),
    "a text for a number": lambda x, y: (x, y, 2, 0, "x"),
}


@pytest.mark.parametrize("name", WRONG)
def test_fields_that_do_not_fit_the_kinds(name: str, run: Callable[..., Any]) -> None:
    library = Library()
    scaled = run(lambda x: LibraryCall(library.scaled, WRONG[name](x, torch.empty_like(x)), x))
    for _ in range(2):
        with pytest.raises(struct.error):
            scaled(torch.ones(2))
    assert library.calls == 0


def test_a_launcher_that_raises_or_returns_results(run: Callable[..., Any]) -> None:
    def launcher(x: Any) -> Any:
        if isinstance(x, str):
            raise TypeError(x)
        return x

    launch, x = run(launcher), torch.ones(2)
    for _ in range(2):
        assert launch(x) is x
        with pytest.raises(TypeError, match="a text"):
            launch("a text")
        assert launch([1]) == [1]  # an argument that is not compared


def test_a_tensor_without_memory_is_an_error(run: Callable[..., Any], launcher: Scaled) -> None:
    """The core checks the arguments of each call that reaches the launcher; a copy that it makes can be freed too."""
    scaled, x = run(launcher), torch.ones(2)
    scaled(x, 2.0)
    x.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(fusedops.InvalidInputError, match="without memory"):
            scaled(x, 2.0)


@needs_memory
def test_the_newest_eight_calls_are_remembered(launcher: Scaled) -> None:
    scaled = prepared(launcher)
    for size in (*range(1, 10), *range(9, 1, -1)):
        scaled(torch.empty(size), 1.0)
    assert launcher.calls == 9
    scaled(torch.empty(1), 1.0)
    assert launcher.calls == 10


@needs_memory
def test_nothing_is_kept_for_longer_than_needed() -> None:
    launcher = Scaled()
    scaled, alive, library = prepared(launcher), weakref.ref(launcher), launcher.library
    text, x = "a text " * 3, torch.ones(2, 2)
    counts = sys.getrefcount(text), sys.getrefcount(x), sys.getrefcount(None)
    for size in range(100):
        scaled(x, size + 0.5, text)
        y = scaled(x, size + 0.5, text)[0]
        scaled(x, 1.0, [text])
    out = weakref.ref(y)
    del y
    assert out() is None
    assert sys.getrefcount(x) == counts[1]
    assert sys.getrefcount(text) <= counts[0] + 8
    assert abs(sys.getrefcount(None) - counts[2]) < 50  # immortal from Python 3.12 on
    del scaled, launcher
    gc.collect()
    assert alive() is None
    assert sys.getrefcount(text) == counts[0]
    assert library.calls


class MakesOtherCalls(TorchFunctionMode):
    """While a remembered call runs, eight others take its place."""

    def __init__(self, others: Callable[[], None]) -> None:
        super().__init__()
        self.others = others

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.is_neg:
            with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
                self.others()
        return function(*args, **(kwargs or {}))


@needs_memory
def test_a_call_that_is_forgotten_while_it_runs(launcher: Scaled) -> None:
    scaled = prepared(launcher)
    x = torch.randn(3)
    scaled(x, 2.0)

    def others() -> None:
        for size in range(10, 20):
            scaled(torch.ones(size), 2.0)

    with MakesOtherCalls(others):
        check(scaled(x, 2.0), x, 2.0)
    assert launcher.calls == 11


@needs_memory
def test_threads(launcher: Scaled) -> None:
    scaled = prepared(launcher)
    wrong: list[int] = []

    def work(offset: int) -> None:
        for call in range(400):
            size = 1 + (call * 7 + offset) % 20
            x = torch.randn(size)
            if not torch.equal(scaled(x, 2.0, str(size), (size, 0))[0], 2 * x):
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_file_that_does_not_load_remembers_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "library").write_bytes(b"no library")
    monkeypatch.setattr(native, "library_path", lambda: tmp_path / "library")
    assert "does not load" in native.loaded.__wrapped__()

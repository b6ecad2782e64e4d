"""Launchers that pack the call of a C function, in Python and remembered by the compiled library."""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fusedops
from fusedops import _native, packed_call
from fusedops.packed_call import PackedCall, PackedFunction, packed_function, results_of, runner

needs_library = pytest.mark.skipif(isinstance(_native.library(), str), reason="needs the core's compiled library")

C_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)
SCALED = struct.Struct("2P2qd")


class Library:
    """A C function that multiplies ``count`` float32 numbers of x by ``scale``, into y; a scale of 13 fails."""

    def __init__(self) -> None:
        self.calls = 0
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._scaled)
        self.scaled = packed_function(self._callback, "rw2qd", lambda status: ValueError(f"status {status}"))
        self._callback.argtypes = [ctypes.c_void_p]  # bytes pass as the address of the struct

    def _scaled(self, address: int) -> int:
        self.calls += 1
        x, y, count, skipped, scale = SCALED.unpack(ctypes.string_at(address, SCALED.size))
        if scale == 13.0:
            return 7
        source = (ctypes.c_float * count).from_address(x + 4 * skipped)
        out = (ctypes.c_float * count).from_address(y)
        out[:] = [scale * value for value in source]
        return 0


class Scaled:
    """The launcher: ``scale * x`` beside None and x. It counts its calls."""

    def __init__(self, library: Library) -> None:
        self.library, self.calls = library, 0

    def __call__(self, x: Tensor, scale: float, *rest: Any) -> Any:
        self.calls += 1
        if not x.numel():
            return torch.empty_like(x), None, x
        dense = x if x.is_contiguous() and not x.is_neg() else x.resolve_neg().contiguous()
        y = torch.empty_like(dense)
        return PackedCall(self.library.scaled, (dense, y, x.numel(), 0, scale), (y, None, x))


@pytest.fixture
def launcher() -> Scaled:
    return Scaled(Library())


@pytest.fixture(params=[pytest.param("library", marks=needs_library), "Python"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`runner`, with the library and without it."""
    if request.param == "Python":
        monkeypatch.setattr(_native, "library", lambda: "it is not here")
    return runner


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


@needs_library
def test_a_call_like_an_earlier_one_does_not_run_the_launcher(launcher: Scaled) -> None:
    scaled = runner(launcher)
    for _ in range(5):
        x = torch.randn(2, 3)
        check(scaled(x, 2.0), x, 2.0)
        parameter = torch.nn.Parameter(x)
        with torch.no_grad():
            check(scaled(parameter, 2.0, "a text", (True, None)), parameter, 2.0)
    assert launcher.calls == 2
    assert launcher.library.calls == 10


OTHERS: dict[str, tuple[Callable[[], Tensor], float]] = {
    "shape": (lambda: torch.randn(3, 2), 2.0),
    "strides": (lambda: torch.randn(3, 2).t(), 2.0),
    "value": (lambda: torch.randn(2, 3), 3.0),
    "negative view": (lambda: torch._neg_view(torch.randn(2, 3)), 2.0),  # pyright: ignore[reportPrivateUsage]
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_call_runs_the_launcher(name: str, run: Callable[..., Any], launcher: Scaled) -> None:
    scaled = run(launcher)
    scaled(torch.randn(2, 3), 2.0)
    make, scale = OTHERS[name]
    for calls in (2, 3):
        x = make()
        check(scaled(x, scale), x, scale)
        if name in ("strides", "negative view"):  # what is read is a copy, and no argument
            assert launcher.calls == calls
    assert launcher.calls >= 2


def test_one_tensor_for_two_parameters_and_then_two_tensors(run: Callable[..., Any]) -> None:
    def added(address: int) -> int:
        x, y, out, count = struct.unpack("3Pq", ctypes.string_at(address, 32))
        one, other = ((ctypes.c_float * count).from_address(each) for each in (x, y))
        (ctypes.c_float * count).from_address(out)[:] = [a + b for a, b in zip(one, other)]
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(added)
    function = packed_function(callback, "2r1wq", lambda status: ValueError(str(status)))
    callback.argtypes = [ctypes.c_void_p]

    def launch(x: Tensor, y: Tensor) -> Any:
        out = torch.empty_like(x)
        return PackedCall(function, (x, y, out, x.numel()), (out, x))

    launcher = run(launch)
    same, one, other = torch.randn(5), torch.randn(5), torch.randn(5)
    for x, y in [(same, same), (one, other), (same, same), (other, one)]:
        out, first = launcher(x, y)
        assert first is x
        assert torch.equal(out, x + y)


def test_zeros_of_both_signs_are_two_values(run: Callable[..., Any], launcher: Scaled) -> None:
    scaled = run(launcher)
    for scale in (0.0, -0.0, 0.0, -0.0):
        y, *_ = scaled(torch.ones(2), scale)
        assert torch.equal(y.signbit(), torch.tensor([scale.hex()[0] == "-"] * 2))


def test_a_status_is_raised_by_every_call(run: Callable[..., Any], launcher: Scaled) -> None:
    scaled = run(launcher)
    for _ in range(3):
        with pytest.raises(ValueError, match="status 7"):
            scaled(torch.ones(2), 13.0)
    assert launcher.library.calls >= 3


def test_a_remembered_call_that_fails_is_raised(run: Callable[..., Any], launcher: Scaled) -> None:
    """The number of a status may depend on what is in memory, such as a storage that was freed."""
    failing = False
    scale_of = launcher.library._scaled  # pyright: ignore[reportPrivateUsage]
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda at: 9 if failing else scale_of(at))
    launcher.library.scaled = packed_function(callback, "rw2qd", lambda status: ValueError(f"status {status}"))
    callback.argtypes = [ctypes.c_void_p]
    scaled = run(launcher)
    x = torch.ones(2)
    for _ in range(2):
        check(scaled(x, 2.0), x, 2.0)
    failing = True
    with pytest.raises(ValueError, match="status 9"):
        scaled(x, 2.0)


def each_time(library: Library) -> dict[str, Callable[[Tensor], Any]]:
    """Return launchers whose calls cannot run without them: what they read or return is made by them."""

    def packed(x: Tensor, results: Callable[[Tensor], Any], written: Tensor | None = None) -> PackedCall:
        y = torch.empty_like(x) if written is None else written
        return PackedCall(library.scaled, (x, y, x.numel(), 0, 2.0), results(y))

    return {
        "a copy is read": lambda x: packed(x.clone(), lambda y: (y,)),
        "a copy is read and returned": lambda x: (lambda copy: packed(copy, lambda y: (y, copy)))(x.clone()),
        "a tensor is made by torch": lambda x: packed(x, lambda y: (y, x + 1)),
        "one result twice": lambda x: packed(x, lambda y: (y, y)),
        "a view of a result": lambda x: packed(x, lambda y: (y, y.view(-1))),
        "what is written is no result": lambda x: packed(x, lambda _: (x,)),
        "an argument is written": lambda x: packed(x, lambda _: (x,), x),
        "another device": lambda x: packed(x, lambda y: (y, torch.empty(2, device="meta"))),
        "nine results": lambda x: packed(x, lambda y: (y, *[None] * 8)),
    }


@needs_library
@pytest.mark.parametrize("name", each_time(Library()))
def test_what_is_no_argument_and_no_result_is_made_each_time(name: str) -> None:
    library, calls = Library(), 0
    launch = each_time(library)[name]

    def launcher(x: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return launch(x)

    scaled = runner(launcher)
    for expected in (1, 2, 3):
        x = torch.randn(4)
        wanted = results_of(launch(x.clone()))
        results = scaled(x)
        assert calls == expected
        for got, want in zip(results, wanted, strict=True):
            assert got is None or got.is_meta or torch.equal(got, want)


def test_results_of_other_shapes_dtypes_and_devices(run: Callable[..., Any]) -> None:
    library, calls = Library(), 0

    def launcher(x: Tensor) -> PackedCall:
        nonlocal calls
        calls += 1
        y, empty = x.new_empty((x.numel(),), dtype=torch.float32), x.new_empty((0, 2), dtype=torch.bfloat16)
        return PackedCall(library.scaled, (x, y, x.numel(), 0, 2.0), (y, empty, empty.to("meta")))

    scaled = run(launcher)
    for _ in range(3):
        x = torch.randn(2, 3)
        y, empty, on_meta = scaled(x)
        assert torch.equal(y, 2 * x.flatten())
        for each, device in ((empty, "cpu"), (on_meta, "meta")):
            assert (each.shape, each.stride(), each.dtype, each.device.type) == ((0, 2), (2, 1), torch.bfloat16, device)
    assert calls == (1 if run is runner and not isinstance(_native.library(), str) else 3)


@needs_library
def test_inference_mode_is_of_the_call(launcher: Scaled) -> None:
    scaled = runner(launcher)
    x = torch.randn(3)
    for inside in (False, True, False):
        with torch.inference_mode(inside):
            y = scaled(x, 2.0)[0]
        assert y.is_inference() is inside
    assert launcher.calls == 1


def test_a_single_result_and_an_offset(run: Callable[..., Any]) -> None:
    library, calls = Library(), 0

    def second_half(x: Tensor) -> PackedCall:
        nonlocal calls
        calls += 1
        half = x.numel() // 2
        y = x.new_empty(half)
        return PackedCall(library.scaled, ((x, 4 * half), (y, 0), half, 0, 3.0), y)

    scaled = run(second_half)
    for _ in range(3):
        x = torch.randn(6)
        y = scaled(x)
        assert isinstance(y, Tensor)
        assert torch.equal(y, 3 * x[3:])
    assert calls == (1 if run is runner and not isinstance(_native.library(), str) else 3)


WRONG = {
    "too few fields": (struct.error, lambda x, y: (x, y, 2, 0)),
    "too many": (struct.error, lambda x, y: (x, y, 2, 0, 1.0, 1)),
    "a text": (struct.error, lambda x, y: (x, y, "2", 0, 1.0)),
    "a number for an integer": (struct.error, lambda x, y: (x, y, 2.5, 0, 1.0)),
    "None for a number": (struct.error, lambda x, y: (x, y, 2, 0, "x")),
}


@pytest.mark.parametrize("name", WRONG)
def test_fields_that_do_not_fit_the_kinds(name: str, run: Callable[..., Any]) -> None:
    library = Library()
    error, fields = WRONG[name]
    scaled = run(lambda x: PackedCall(library.scaled, fields(x, torch.empty_like(x)), x))
    for _ in range(2):
        with pytest.raises(error):
            scaled(torch.ones(2))
    assert library.calls == 0


def test_a_launcher_that_raises_or_returns_results(run: Callable[..., Any]) -> None:
    def launcher(x: Any) -> Any:
        if isinstance(x, str):
            raise TypeError(x)
        return x

    launch = run(launcher)
    x = torch.ones(2)
    for _ in range(2):
        assert launch(x) is x
        with pytest.raises(TypeError, match="a text"):
            launch("a text")
        assert launch([1]) == [1]  # an argument that is not remembered


def test_kinds() -> None:
    function = C_FUNCTION(lambda _: 0)
    for kinds, each in (("", b""), ("12r", b"r" * 12), ("2r1wqd3q", b"rrwqdqqq"), ("0wq", b"q")):
        assert packed_function(function, kinds, RuntimeError).kinds == each
    assert isinstance(packed_function(function, "q", RuntimeError), PackedFunction)


def test_a_kernel_that_packs_its_calls(launcher: Scaled) -> None:
    @fusedops.kernel("bias_gelu", packed=True)
    def kernel(x: Tensor, bias: None, approximate: str) -> Any:
        y, *_ = results_of(launcher(x, 2.0))
        return PackedCall(launcher.library.scaled, (x, y, x.numel(), 0, 5.0), y)

    assert torch.equal(kernel.call(torch.ones(2), None, "none"), torch.full((2,), 5.0))
    assert type(kernel.function(torch.ones(2), None, "none")) is PackedCall


@needs_library
def test_nothing_is_kept_for_longer_than_needed() -> None:
    launcher = Scaled(Library())
    scaled, alive, library = runner(launcher), weakref.ref(launcher), launcher.library
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


@needs_library
def test_a_call_that_is_forgotten_while_it_runs(launcher: Scaled) -> None:
    scaled = runner(launcher)
    x = torch.randn(3)
    scaled(x, 2.0)

    def others() -> None:
        for size in range(10, 20):
            scaled(torch.ones(size), 2.0)

    with MakesOtherCalls(others):
        check(scaled(x, 2.0), x, 2.0)
    assert launcher.calls == 11


@needs_library
def test_threads(launcher: Scaled) -> None:
    scaled = runner(launcher)
    wrong: list[int] = []

    def work(offset: int) -> None:
        for call in range(400):
            size = 1 + (call * 7 + offset) % 20
            x = torch.randn(size)
            if not torch.equal(scaled(x, 2.0)[0], 2 * x):
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_the_library_calls_are_packed_in_python(monkeypatch: pytest.MonkeyPatch, launcher: Scaled) -> None:
    monkeypatch.setattr(_native, "library", lambda: "it is not here")
    scaled = packed_call.runner(launcher)
    x = torch.ones(2)
    for calls in (1, 2):
        check(scaled(x, 2.0), x, 2.0)
        assert launcher.calls == calls

"""The shorter interpreter of the tests: the results and the language are those of Triton's own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import quick_interpreter
import torch
import triton
from triton import language as tl
from triton.runtime import interpreter

import fusedops
import fusedops_triton


@pytest.fixture
def plain() -> Iterator[None]:
    """Triton's own interpreter, until the end of the test."""
    quick_interpreter.uninstall()
    yield
    quick_interpreter.install()


def results() -> list[torch.Tensor]:
    """Return the results of kernels that call functions of their own and of Triton: sums, maxima, tanh, Philox."""
    torch.manual_seed(0)
    x, weight, seed = torch.randn(6, 40), torch.randn(9, 40), torch.tensor([5])
    with fusedops.use("triton", fallback="raise"):
        return [
            fusedops.linear_cross_entropy(x, weight, torch.arange(6), softcap=3.0, label_smoothing=0.1),
            fusedops.scaled_masked_softmax(x, None, 0.5, causal=False),
            fusedops.bias_dropout(x, None, 0.3, training=True, seed=seed),
            fusedops.bias_gelu(x, None),
        ]


def language() -> list[tuple[str, Any]]:
    """Return what a launch may replace in the language, and restores."""
    return [*inspect.getmembers(tl), *inspect.getmembers(tl.math), *inspect.getmembers(tl.tensor, inspect.isfunction)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows by one for each builtin that is replaced."""
    replaced: list[Any] = []
    real = interpreter._patch_attr
    monkeypatch.setattr(interpreter, "_patch_attr", lambda *args: replaced.append(args[1]) or real(*args))
    return replaced


def test_results_are_those_of_the_plain_interpreter(request: pytest.FixtureRequest) -> None:
    quick = results()
    request.getfixturevalue("plain")
    assert all(map(torch.equal, quick, results()))


def test_a_launch_replaces_and_restores_what_the_plain_interpreter_does(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    results()  # the first call of a function of Triton replaces members of tl.core for good
    before, replaced = language(), counted(monkeypatch)
    results()
    quick = set(replaced)
    assert language() == before
    request.getfixturevalue("plain")
    replaced = counted(monkeypatch)
    results()
    assert set(replaced) == quick


def test_members_are_listed_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes it shorter: another release of Triton may go another way, and the tests then take twice as long."""
    listed: list[Any] = []
    real = inspect.getmembers
    monkeypatch.setattr(inspect, "getmembers", lambda *args: listed.append(args) or real(*args))
    results()
    assert not listed
    request.getfixturevalue("plain")
    results()
    assert len(listed) > 50


@triton.jit
def _beside_numbers(x_ptr, out_ptr):
    """Write ``x * 0.0``, ``x * -0.0`` and ``x * 0``."""
    at = tl.arange(0, 4)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, x * 0.0)
    tl.store(out_ptr + 4 + at, x * -0.0)
    tl.store(out_ptr + 8 + at, x * 0)


@pytest.mark.skipif(
    triton.__version__.startswith(("3.4", "3.5", "3.6")), reason="before Triton 3.7, -x is 0 - x: -0.0 is 0.0"
)
def test_numbers_of_python_keep_their_sign() -> None:
    out = torch.empty(12)
    _beside_numbers[(1,)](torch.ones(4), out)
    assert torch.signbit(out).tolist() == [False] * 4 + [True] * 4 + [False] * 4


@triton.jit
def _of_two_kinds(x_ptr, out_ptr):
    """Write twice a sum of blocks of several shapes and types: the second time, types and shapes are known."""
    for turn in range(2):
        rows, columns = tl.arange(0, 4)[:, None], tl.arange(0, 4)
        x, number = tl.load(x_ptr + columns), tl.load(x_ptr + 2)
        table = rows.to(tl.int64) * 7 + columns
        table += (rows < columns) & (columns < 3)
        y = (
            x.to(tl.float16) * table
            + x * (table + 16777217)
            + x.to(tl.float64) * number
            + tl.where(rows < 2, x, number)
            + x[None, :] * rows
        )
        tl.store(out_ptr + turn * 16 + rows * 4 + columns, y)


def test_two_tensors_of_other_shapes_and_types(request: pytest.FixtureRequest) -> None:
    def result() -> torch.Tensor:
        out = torch.empty(2, 4, 4)
        _of_two_kinds[(1,)](torch.tensor([0.3, -1.7, 300.1, 1e-3]), out)
        return out

    quick = result()
    request.getfixturevalue("plain")
    assert torch.equal(quick, result())


@pytest.mark.parametrize(("of_triton", "of_numpy", "works"), [("3.6.0", "2.4.6", False), ("3.6.0", "2.3.5", True),
                                                              ("3.10.0", "2.4.6", True)])  # fmt: skip
def test_a_version_that_cannot_loop_is_unavailable(
    of_triton: str, of_numpy: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", of_triton)
    monkeypatch.setattr(numpy, "__version__", of_numpy)
    found = fusedops_triton._probe()
    assert (found is None) == works
    assert found is None or "numpy<2.4" in found.fix


def test_a_machine_without_a_gpu_is_not_asked_for_triton_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it raises
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = fusedops_triton._probe()
    assert found is not None
    assert found.why == "torch.cuda.is_available() is False"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = fusedops_triton._probe()
    assert found is not None
    assert found.fix == "pip install 'fusedops[triton]'"

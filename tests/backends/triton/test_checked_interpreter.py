"""The checked interpreter of the tests finds accesses outside of the tensors of a launch, and accesses of any order."""

from __future__ import annotations

from typing import Any

import checked_interpreter
import pytest
import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction

SIZE = 10


@triton.jit
def _copy(y_ptr: Any, x_ptr: Any, first: Any, loaded: Any, stored: Any, BLOCK: tl.constexpr) -> None:
    at = first + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, (at >= 0) & (at < loaded), 0.0), (at >= 0) & (at < stored))


@triton.jit
def _add(y_ptr: Any, added: Any, BLOCK: tl.constexpr) -> None:
    at = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + at, 1.0, at < added)


@triton.jit
def _blocks(y_ptr: Any, x_ptr: Any, step: Any, AXIS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(AXIS) * step + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at) + 1.0)


pytestmark = pytest.mark.skipif(not isinstance(_copy, InterpretedFunction), reason="needs Triton's interpreter")


def copy(first: int, loaded: int, stored: int, x: Tensor | None = None) -> Tensor:
    """Copy a block from x to a new tensor of ten elements, those below ``loaded``, as far as ``stored``."""
    y = torch.zeros(SIZE)
    _copy[(1,)](y, torch.arange(1.0, SIZE + 1) if x is None else x, first, loaded, stored, BLOCK=16)
    return y


@pytest.mark.parametrize("first", [-3, 0, 5])
def test_what_is_inside_is_copied(first: int) -> None:
    expected = [index + 1 if first <= index < first + 16 else 0 for index in range(SIZE)]
    assert copy(first, SIZE, SIZE).tolist() == expected


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((0, SIZE + 1, SIZE), r"a load of 4 bytes outside of all tensors of the launch, 0 bytes from the end of x_ptr"),
        (
            (0, SIZE, SIZE + 2),
            r"a store of 4 bytes outside .*, expected a mask that is False there \(2 of 12 elements\)",
        ),
        ((2**20, 2**21, SIZE), r"a load of 4 bytes outside"),
    ],
    ids=["load", "store", "far"],
)
def test_what_is_outside_is_found(given: tuple[int, int, int], found: str) -> None:
    with pytest.raises(InterpreterError, match=found):
        copy(*given)


def test_an_atomic_operation_outside_is_found() -> None:
    y = torch.zeros(SIZE)
    _add[(1,)](y, SIZE, BLOCK=16)
    assert y.sum() == SIZE
    with pytest.raises(InterpreterError, match=r"an atomic operation of 4 bytes outside"):
        _add[(1,)](y, SIZE + 1, BLOCK=16)


def test_the_storage_of_a_view_may_be_read() -> None:
    """As the padding of rows of logits is."""
    padded = torch.arange(16.0)
    assert copy(0, 16, SIZE, padded[:SIZE]).tolist() == list(range(SIZE))


def test_no_element_of_a_tensor_without_storage_may_be_read() -> None:
    with pytest.raises(InterpreterError, match=r"a load of 4 bytes outside"):
        copy(0, 1, 0, torch.empty(0))


def test_programs_may_replace_what_they_load() -> None:
    y = torch.zeros(24)
    _blocks[(3,)](y, y, 8, 0, BLOCK=8)
    assert y.sum() == 24


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_elements_that_two_programs_store_are_found(axis: int) -> None:
    grid = tuple(2 if at == axis else 1 for at in range(3))
    with pytest.raises(AssertionError, match=r"got 4 elements that two programs of a launch store, of y_ptr"):
        _blocks[grid](torch.zeros(24), torch.zeros(24), 4, axis, BLOCK=8)


def test_elements_that_one_program_loads_and_another_stores_are_found() -> None:
    x = torch.zeros(24)
    with pytest.raises(AssertionError, match=r"got 8 elements that a program of a launch loads and another stores"):
        _blocks[(2,)](x[8:], x, 8, 0, BLOCK=8)


def test_what_is_kept_of_a_launch_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_interpreter, "MOST", 16)  # the first program has as many
    _blocks[(2,)](torch.zeros(24), torch.zeros(24), 4, 0, BLOCK=8)
    with pytest.raises(AssertionError, match=r"two programs of a launch store"):
        _blocks[(2,)](torch.zeros(24), torch.zeros(24), 0, 0, BLOCK=4)

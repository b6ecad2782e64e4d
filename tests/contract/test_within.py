"""The range of a tensor's numbers, read by the compiled library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusedops import _native

needs_library = pytest.mark.skipif(isinstance(_native.library(), str), reason="needs the core's compiled library")


class Subclass(Tensor):
    pass


def freed() -> Tensor:
    tensor = torch.tensor([1, 2])
    tensor.untyped_storage().resize_(0)
    return tensor


INSIDE: dict[str, Tensor] = {
    "all": torch.arange(5),
    "one": torch.tensor(4),
    "rows": torch.tensor([[0, 4], [1, 3]]),
    "none": torch.empty(0, 3, dtype=torch.int64),
    "a part": torch.arange(-1, 9)[1:6],
    "a parameter": torch.nn.Parameter(torch.arange(5), requires_grad=False),
    "as many as one thread reads": torch.ones(65536, dtype=torch.int64),
}
OUTSIDE: dict[str, Tensor] = {
    "the end": torch.tensor([0, 5]),
    "below 0": torch.tensor([-1, 0]),
    "the first": torch.tensor([7, 0, 0]),
    "the last of many": torch.cat([torch.zeros(999, dtype=torch.int64), torch.tensor([-100])]),
    "the largest": torch.tensor([2**63 - 1]),
    "the smallest": torch.tensor([-(2**63)]),
}
NOT_READ: dict[str, Callable[[], Tensor]] = {
    "int32": lambda: torch.tensor([1], dtype=torch.int32),
    "float": lambda: torch.ones(1),
    "gaps": lambda: torch.ones(4, dtype=torch.int64)[::2],
    "another device": lambda: torch.ones(2, dtype=torch.int64, device="meta"),
    "subclass": lambda: torch.ones(2, dtype=torch.int64).as_subclass(Subclass),
    "many": lambda: torch.ones(65537, dtype=torch.int64),
    "freed": freed,
}


@needs_library
@pytest.mark.parametrize("name", INSIDE)
def test_numbers_inside(name: str) -> None:
    assert _native.within()(INSIDE[name], 5) is True


@needs_library
@pytest.mark.parametrize("name", OUTSIDE)
def test_numbers_outside(name: str) -> None:
    assert _native.within()(OUTSIDE[name], 5) is False


@needs_library
@pytest.mark.parametrize("name", NOT_READ)
def test_tensors_that_are_not_read(name: str) -> None:
    assert _native.within()(NOT_READ[name](), 5) is False


@needs_library
def test_arguments_that_are_not_read() -> None:
    within: Callable[..., object] = _native.within()
    assert within(torch.arange(2), 2**70) is False
    assert within(torch.arange(2), "5") is False
    assert within([1], 5) is False
    assert within(torch.arange(2)) is False
    assert within(torch.empty(0, dtype=torch.int64), 0) is True
    assert within(torch.arange(1), 0) is False


def test_without_the_library_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "library", lambda: "it is not here")
    assert _native.within()(torch.arange(2), 5) is False

"""The outcome of a trial is kept for the next model, and nothing that changes a module leaves it in effect."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from fusedops.integrations.transformers import apply
from fusedops.integrations.transformers._modules import norms as _norms

pytestmark = pytest.mark.filterwarnings("ignore:apply. fusedops in:fusedops.FusedOpsWarning")
LIMIT = 0.0


def scaled(x: Tensor, factor: float = 1.0) -> Tensor:
    return x * (factor + LIMIT)


class OwnNorm(nn.Module):
    """A norm whose code reads all that a test changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.eps, self.shift = 1e-5, 0.0

    def root(self, x: Tensor) -> Tensor:
        return torch.reciprocal((x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())

    def forward(self, x: Tensor) -> Tensor:
        return scaled(x * self.root(x) * self.weight) + self.shift


class OtherNorm(OwnNorm):
    def root(self, x: Tensor) -> Tensor:
        return 2 * super().root(x)


def left(module: nn.Module) -> str:
    (row,) = apply(nn.Sequential(module)).rows
    return row.left


def other_root(_: Any, x: Tensor) -> Tensor:
    return x.abs().mean(-1, keepdim=True).reciprocal()


def doubled(own: Callable[..., Tensor]) -> Any:
    return lambda *args: 2 * own(*args)


HERE = sys.modules[__name__]
CHANGES: dict[str, tuple[Any, str, Any]] = {
    "the forward of its class": (OwnNorm, "forward", lambda self, x: 2 * x * self.root(x) * self.weight),
    "a method": (OwnNorm, "root", other_root),
    "a global": (HERE, "LIMIT", 1.0),
    "a function": (HERE, "scaled", lambda x: 2 * x),
    "a default": (scaled, "__defaults__", (2.0,)),
    "a code": (scaled, "__code__", (lambda x, factor=1.0: 2 * x * (factor + LIMIT)).__code__),
    "a function of torch": (torch, "reciprocal", doubled(torch.reciprocal)),
    "a method of a tensor": (Tensor, "mean", doubled(Tensor.mean)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_module_reads_is_tried_again(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not left(OwnNorm())
    monkeypatch.setattr(*CHANGES[change])
    assert left(OwnNorm())
    monkeypatch.undo()
    assert not left(OwnNorm())


def test_another_module_of_the_class_is_tried() -> None:
    assert not left(OwnNorm())
    assert left(OtherNorm())
    norm = OwnNorm()
    norm.shift = 1.0
    assert left(norm)
    norm = OwnNorm()
    norm.forward = doubled(norm.forward)
    assert left(norm) == "another library has replaced its forward"
    norm, x = OwnNorm(), torch.randn(2, 16)
    norm.eps = 0.5
    expected = norm(x)
    assert not left(norm)
    torch.testing.assert_close(norm(x), expected)


def test_an_activation_of_a_library_that_is_changed_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def mlp() -> nn.Module:
        return LlamaMLP(transformers.LlamaConfig(hidden_size=32, intermediate_size=32))

    assert not left(mlp())
    monkeypatch.setattr(nn.functional, "silu", doubled(nn.functional.silu))
    assert left(mlp()) == "its results are those of neither swiglu nor geglu"


def test_a_second_module_takes_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not left(OwnNorm())
    monkeypatch.setattr(_norms, "numbers", None)
    assert not left(OwnNorm())
    with torch.device("cpu"), pytest.raises(TypeError):  # a mode may change what a trial sees
        left(OwnNorm())


def test_a_class_ends_with_its_modules() -> None:
    kind = type("OwnNorm", (OwnNorm,), {})
    assert not left(kind())
    ended = weakref.ref(kind)
    del kind
    for _ in range(2):  # the class of a replaced module ends first
        gc.collect()
    assert ended() is None

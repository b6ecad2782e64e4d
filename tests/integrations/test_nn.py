"""The modules: the ops' answers, the modules' settings, and nothing kept."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedops
import fusedops.nn
from fusedops.errors import InvalidInputError, PolicyError


def test_softmax() -> None:
    x, mask = torch.randn(2, 3, 5, 5), torch.rand(2, 1, 1, 5) < 0.4
    module = fusedops.nn.ScaledMaskedSoftmax(0.25, causal=True)
    assert torch.equal(module(x, mask), fusedops.scaled_masked_softmax(x, mask, 0.25, causal=True))
    assert torch.equal(fusedops.nn.ScaledMaskedSoftmax()(x), fusedops.scaled_masked_softmax(x))


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gelu(approximate: Any) -> None:
    x, bias = torch.randn(4, 8), torch.randn(8)
    module = fusedops.nn.BiasGELU(approximate)
    assert torch.equal(module(x, bias), fusedops.bias_gelu(x, bias, approximate=approximate))
    assert torch.equal(module(x), fusedops.bias_gelu(x, approximate=approximate))


def test_swiglu() -> None:
    gate, up = torch.randn(4, 8), torch.randn(4, 8)
    settings = {"limit": 1.0, "alpha": 1.702, "offset": 1.0, "interleaved": True}
    module = fusedops.nn.SwiGLU(**settings)
    assert torch.equal(module(gate, up), fusedops.swiglu(gate, up, **settings))
    assert torch.equal(module(gate), fusedops.swiglu(gate, **settings))
    assert torch.equal(fusedops.nn.SwiGLU()(gate), fusedops.swiglu(gate))


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_geglu(approximate: Any) -> None:
    gate, up = torch.randn(4, 8), torch.randn(4, 8)
    module = fusedops.nn.GEGLU(approximate, interleaved=True)
    assert torch.equal(module(gate, up), fusedops.geglu(gate, up, approximate=approximate))
    assert torch.equal(module(gate), fusedops.geglu(gate, approximate=approximate, interleaved=True))


def test_cross_entropy() -> None:
    logits, target = torch.randn(4, 8), torch.tensor([1, 7, -1, 0])
    settings = {"ignore_index": -1, "reduction": "mean", "label_smoothing": 0.1, "z_loss": 0.2, "softcap": 3.0}
    module = fusedops.nn.CrossEntropyLoss(**settings)
    assert torch.equal(module(logits, target), fusedops.cross_entropy(logits, target, **settings))
    assert torch.equal(module(logits, target, 5), fusedops.cross_entropy(logits, target, denominator=5, **settings))
    assert torch.equal(fusedops.nn.CrossEntropyLoss()(logits, target % 8), fusedops.cross_entropy(logits, target % 8))


def test_dropout_follows_the_mode_of_the_module() -> None:
    x, bias, residual = torch.randn(64, 8), torch.randn(8), torch.randn(64, 8)
    module = fusedops.nn.BiasDropoutAdd(0.4)
    assert torch.equal(module(x, bias, residual, seed=5), fusedops.bias_dropout_add(x, bias, residual, 0.4, seed=5))
    torch.manual_seed(3)
    drawn = module(x, None, residual)
    torch.manual_seed(3)
    assert torch.equal(drawn, fusedops.bias_dropout_add(x, None, residual, 0.4))
    before = x.clone()
    assert torch.equal(module.eval()(x, bias, residual), fusedops.bias_dropout_add(x, bias, residual, 0.0))
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (fusedops.nn.ScaledMaskedSoftmax(), "ScaledMaskedSoftmax(scale=1.0, causal=False)"),
        (
            fusedops.nn.ScaledMaskedSoftmax(0.125, causal=True, backend="npu,eager"),
            "ScaledMaskedSoftmax(scale=0.125, causal=True, backend='npu,eager')",
        ),
        (fusedops.nn.BiasGELU("none"), "BiasGELU(approximate='none')"),
        (fusedops.nn.BiasDropoutAdd(0.1, backend="eager"), "BiasDropoutAdd(p=0.1, backend='eager')"),
        (fusedops.nn.GEGLU("none", backend="npu"), "GEGLU(approximate='none', interleaved=False, backend='npu')"),
        (
            fusedops.nn.SwiGLU(limit=7.0, backend="npu"),
            "SwiGLU(limit=7.0, alpha=1.0, offset=0.0, interleaved=False, backend='npu')",
        ),
    ],
)
def test_the_repr_has_the_settings_and_nothing_is_kept(module: torch.nn.Module, text: str) -> None:
    assert repr(module) == text
    assert not module.state_dict()
    assert not list(module.parameters())
    assert repr(copy.deepcopy(module)) == repr(pickle.loads(pickle.dumps(module))) == text


def test_gradients_and_compile() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
            self.gelu, self.add = fusedops.nn.BiasGELU(), fusedops.nn.BiasDropoutAdd(0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.gelu(torch.nn.functional.linear(x, self.linear.weight), self.linear.bias)
            return self.add(hidden, None, x)

    block, x = Block(), torch.randn(4, 8)
    block(x).square().sum().backward()
    plain = [parameter.grad for parameter in block.parameters()]
    block.zero_grad()
    torch._dynamo.reset()
    torch.compile(block, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    for parameter, gradient in zip(block.parameters(), plain):
        torch.testing.assert_close(parameter.grad, gradient)


def test_the_backend_of_a_module_is_a_policy() -> None:
    x = torch.randn(4, 8)
    assert torch.equal(fusedops.nn.BiasGELU(backend="eager")(x), fusedops.bias_gelu(x, backend="eager"))
    with pytest.raises(PolicyError, match="egaer"):
        fusedops.nn.BiasGELU(backend="egaer")(x)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda x: fusedops.nn.ScaledMaskedSoftmax(float("nan"))(x), "got scale = nan"),
        (lambda x: fusedops.nn.BiasGELU("exact")(x), "got approximate = 'exact'"),  # pyright: ignore[reportArgumentType]
        (lambda x: fusedops.nn.BiasDropoutAdd(1.5)(x, None, x), "got p = 1.5"),
    ],
)
def test_a_wrong_setting_is_an_error_of_the_op(call: Callable[[torch.Tensor], Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        call(torch.randn(4, 8))


def test_attention() -> None:
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    mask = fusedops.masks.from_lengths(torch.tensor([5, 2]), 5)
    settings = {"scale": 0.3, "causal": "lower_right", "window": (2, 0), "return_lse": True}
    module = fusedops.nn.Attention(**settings)
    for one, other in zip(module(q, k, k, mask), fusedops.attention(q, k, k, mask, **settings)):
        assert torch.equal(one, other)
    assert torch.equal(fusedops.nn.Attention()(q, k, k), fusedops.attention(q, k, k))
    assert "return_lse=True" in repr(module)
    assert not list(module.parameters())

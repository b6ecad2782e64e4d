"""The modules: the ops' answers, the modules' settings, and nothing kept."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedops
from fusedops import nn
from fusedops.errors import InvalidInputError, PolicyError


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


X, GATE, Q, K = numbers(2, 3, 5, 5), numbers(4, 8), numbers(2, 4, 3, 8), numbers(2, 2, 5, 8)
MASK, LENGTHS = numbers(2, 1, 1, 5) < -0.3, fusedops.masks.from_lengths(torch.tensor([5, 2]), 5)
TARGET = torch.tensor([1, 7, -1, 0])
LOSS = {"ignore_index": -1, "reduction": "mean", "label_smoothing": 0.1, "z_loss": 0.2, "softcap": 3.0}
CAUSAL = {"scale": 0.3, "causal": "lower_right", "window": (2, 0), "return_lse": True}
GATED = {"limit": 1.0, "alpha": 1.702, "offset": 1.0, "interleaved": True}
#: A module and its settings, which are the op's, and the arguments of each call.
CALLS: list[tuple[Any, Any, dict[str, Any], list[tuple[Any, ...]]]] = [
    (nn.ScaledMaskedSoftmax, fusedops.scaled_masked_softmax, {"scale": 0.25, "causal": True}, [(X, MASK)]),
    (nn.ScaledMaskedSoftmax, fusedops.scaled_masked_softmax, {}, [(X,)]),
    (nn.BiasGELU, fusedops.bias_gelu, {"approximate": "tanh"}, [(GATE, GATE[0]), (GATE,)]),
    (nn.BiasGELU, fusedops.bias_gelu, {"approximate": "none"}, [(GATE, GATE[0]), (GATE,)]),
    (nn.SwiGLU, fusedops.swiglu, GATED, [(GATE, GATE.flip(0)), (GATE,)]),
    (nn.SwiGLU, fusedops.swiglu, {}, [(GATE,)]),
    (nn.GEGLU, fusedops.geglu, {"approximate": "tanh", "interleaved": True}, [(GATE, GATE.flip(0)), (GATE,)]),
    (nn.GEGLU, fusedops.geglu, {"approximate": "none", "interleaved": True}, [(GATE, GATE.flip(0)), (GATE,)]),
    (nn.CrossEntropyLoss, fusedops.cross_entropy, LOSS, [(GATE, TARGET), (GATE, TARGET, 5)]),
    (nn.CrossEntropyLoss, fusedops.cross_entropy, {}, [(GATE, TARGET % 8)]),
    (nn.Attention, fusedops.attention, CAUSAL, [(Q, K, K, LENGTHS)]),
    (nn.Attention, fusedops.attention, {}, [(Q, K, K)]),
]


@pytest.mark.parametrize(("module", "op", "settings", "calls"), CALLS)
def test_a_module_is_the_op_with_its_settings(
    module: Any, op: Any, settings: dict[str, Any], calls: list[tuple[Any, ...]]
) -> None:
    made = module(**settings)
    assert not list(made.parameters())
    assert all(f"{name}={value!r}" in repr(made) for name, value in settings.items())
    for args in calls:
        named = dict(zip(("logits", "target", "denominator"), args)) if op is fusedops.cross_entropy else None
        want = op(*args, **settings) if named is None else op(**named, **settings)
        got = made(*args)
        pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("RMSNorm", (8, 1e-6, False, "cpu", torch.bfloat16), {}),
        ("RMSNorm", ((8,), 1e-6), {}),
        ("RMSNorm", (), {"normalized_shape": [8], "eps": 1e-6}),
        ("LayerNorm", (8, 1e-5, True, False, "cpu", torch.bfloat16), {}),
        ("LayerNorm", (torch.Size([8]),), {}),
        ("CrossEntropyLoss", (None, None, 3, None, "sum", 0.1), {}),
        ("CrossEntropyLoss", (), {"weight": None, "size_average": None, "reduce": None}),
    ],
)
def test_the_arguments_of_torchs_class(name: str, args: Any, kwargs: Any) -> None:
    mine, theirs = getattr(nn, name)(*args, **kwargs), getattr(torch.nn, name)(*args, **kwargs)
    assert {key: (each.dtype, each.shape) for key, each in mine.state_dict().items()} == {
        key: (each.dtype, each.shape) for key, each in theirs.state_dict().items()
    }
    call = (GATE, TARGET % 8) if "Loss" in name else (GATE.to(next(iter(mine.state_dict().values()), GATE).dtype),)
    torch.testing.assert_close(mine(*call), theirs(*call))


def test_the_arguments_of_torchs_loss_of_a_linear_layer() -> None:
    options = {"out_features": (), "weight": None, "options": None, "ignore_index": None, "bias": True}
    loss = nn.LinearCrossEntropyLoss(in_features=8, num_classes=5, **options)
    assert loss.ignore_index == -100
    assert loss.bias is not None


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

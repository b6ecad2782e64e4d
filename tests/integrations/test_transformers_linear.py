"""apply(linear=True): the linear layers of a model, with values, gradients and what users do to a layer afterwards."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn import Linear, Module, Parameter, Sequential, Tanh

import fusedops
from fusedops.errors import InvalidInputError
from fusedops.integrations.transformers import apply, quantize

SIZE = 256


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernel chosen on any processor."""
    linear = pytest.importorskip("fusedops_cpu.linear.linear")
    if any(info.name == "cpu" and info.state == "unavailable" for info in fusedops.backends()):
        pytest.skip("the library is not compiled")
    monkeypatch.setattr(linear.library(), "is_ahead_of_mkl", True)


def model_of(bias: bool = True) -> Module:
    torch.manual_seed(0)
    return Sequential(Linear(SIZE, 320, bias=bias), Tanh(), Linear(320, SIZE), Linear(SIZE, 8))


def served(model: Module, x: Any) -> set[str]:
    """Return the backends of linear in a call."""
    fusedops.reset_stats()
    model(x)
    return {each.backend for each in fusedops.stats().counts if each.op == "linear"}


@pytest.mark.parametrize("shape", [(1,), (3, 7), (60,)], ids=str)
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...]) -> None:
    model = model_of()
    x = torch.randn(*shape, SIZE, requires_grad=True)
    plain = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    applied = apply(model, linear=True)
    assert applied.ops == {"linear": 2}
    assert any("expected a size of at least 256" in row.left for row in applied.rows)
    for mine, want in zip(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]), plain):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    applied.remove()
    again = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    assert all(torch.equal(mine, want) for mine, want in zip(again, plain))


def test_without_the_argument_no_layer_is_replaced() -> None:
    with pytest.warns(fusedops.FusedOpsWarning):
        assert not apply(model_of()).ops


def in_double(model: Any) -> Any:
    return model.double(), torch.float64


def under_autocast(model: Any) -> Any:
    return torch.autocast("cpu", torch.bfloat16)(model), torch.float32


@pytest.mark.parametrize("change", [in_double, under_autocast])
def test_other_dtypes_are_left_to_torch(change: Callable[[Any], Any]) -> None:
    plain = model_of()
    model = deepcopy(plain)
    apply(model, linear=True)
    (mine, dtype), (own, _) = change(model), change(plain)
    x = torch.randn(3, SIZE, dtype=dtype)
    assert torch.equal(mine(x), own(x))


def test_a_weight_that_changes_is_read_anew() -> None:
    model = model_of()
    x = torch.randn(3, SIZE)
    apply(model, linear=True)
    with torch.no_grad():
        assert served(model, x) == {"cpu"}
        model[0].weight.mul_(2.0)
        model[2].weight = Parameter(torch.randn(SIZE, 320))
        mine = model(x)
    plain = model_of()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(mine, plain(x).detach())


def test_wrong_sizes_raise_what_torch_raises() -> None:
    model = model_of()
    apply(model, linear=True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        model(torch.randn(3, 5))
    assert not isinstance(raised.value, InvalidInputError)


def test_a_replaced_layer_is_packed() -> None:
    model = model_of()
    x = torch.randn(3, SIZE)
    want = deepcopy(model)
    quantize(want, format="Q8_0")
    apply(model, linear=True)
    packed = quantize(model, format="Q8_0")
    assert packed.ops == {"quantized_linear": 3}
    assert torch.equal(model(x), want(x))


def test_the_output_embedding_takes_the_fused_loss_afterwards() -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, int] = {"hidden_size": SIZE, "intermediate_size": 320, "num_hidden_layers": 1, "vocab_size": 300}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    assert apply(model, linear=True).ops["linear"] == 7
    assert "linear_cross_entropy" in apply(model, fused_loss=True).ops

"""apply: the linear layers of a model, and the activation behind one, and what users do to a layer afterwards."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn import GELU, Dropout, Linear, Module, Parameter, Sequential, Tanh

import fusedops
from fusedops.errors import InvalidInputError
from fusedops.integrations.transformers import apply, quantize

SIZE = 256
linear = pytest.importorskip("fusedops_cpu.linear.linear")


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernel chosen on any processor."""
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
    applied = apply(model, ops=["linear"])
    assert applied.ops == {"linear": 2}
    assert any("expected a size of at least 256" in row.left for row in applied.rows)
    for mine, want in zip(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]), plain):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    applied.remove()
    again = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    assert all(torch.equal(mine, want) for mine, want in zip(again, plain))


def test_layers_that_torch_computes_as_fast_have_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear.library(), "is_ahead_of_mkl", False)
    with pytest.warns(fusedops.FusedOpsWarning):
        assert not apply(model_of()).rows


def in_double(model: Any) -> Any:
    return model.double(), torch.float64


def under_autocast(model: Any) -> Any:
    return torch.autocast("cpu", torch.bfloat16)(model), torch.float32


@pytest.mark.parametrize("change", [in_double, under_autocast])
def test_other_dtypes_are_left_to_torch(change: Callable[[Any], Any]) -> None:
    plain = model_of()
    model = deepcopy(plain)
    apply(model)
    (mine, dtype), (own, _) = change(model), change(plain)
    x = torch.randn(3, SIZE, dtype=dtype)
    assert torch.equal(mine(x), own(x))


def test_a_weight_that_changes_is_read_anew() -> None:
    model = model_of()
    x = torch.randn(3, SIZE)
    apply(model)
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
    apply(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        model(torch.randn(3, 5))
    assert not isinstance(raised.value, InvalidInputError)


def test_a_replaced_layer_is_packed() -> None:
    model = model_of()
    x = torch.randn(3, SIZE)
    want = deepcopy(model)
    quantize(want, format="Q8_0")
    apply(model)
    packed = quantize(model, format="Q8_0")
    assert packed.ops == {"quantized_linear": 3}
    assert torch.equal(model(x), want(x))


def test_the_output_embedding_takes_the_fused_loss_afterwards() -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, int] = {"hidden_size": SIZE, "intermediate_size": 320, "num_hidden_layers": 1, "vocab_size": 300}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    assert apply(model).ops["linear"] == 7
    assert "linear_cross_entropy" in apply(model, fused_loss=True).ops


class Mlp(Module):
    def __init__(self, activation: Module) -> None:
        super().__init__()
        self.up, self.act, self.dropout, self.down = Linear(SIZE, 320), activation, Dropout(0.5), Linear(320, SIZE)

    def forward(self, x: Any) -> Any:
        return self.down(self.dropout(self.act(self.up(x))))


class WithResidual(Mlp):
    def forward(self, x: Any) -> Any:
        h = self.up(x)
        return self.down(self.act(h) + h)


def mlp_of(activation: Module, kind: type[Mlp] = Mlp) -> Any:
    torch.manual_seed(0)
    return kind(activation).eval()


def joined(model: Any, x: Any, activation: Any) -> Any:
    """What a model computes with the activation in the layer before it."""
    return fusedops.linear(
        fusedops.linear(x, model.up.weight, model.up.bias, activation=activation), model.down.weight, model.down.bias
    )


ACTIVATIONS: Any = {"gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu", "relu": "relu", "relu2": "relu2"}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_activation_behind_a_layer_is_joined_to_it(name: str) -> None:
    from transformers.activations import ACT2FN

    model, x = mlp_of(ACT2FN[ACTIVATIONS[name]]), torch.randn(5, SIZE)
    with torch.no_grad():
        plain = model(x)
        applied = apply(model, ops=["linear"])
        assert ("Mlp", "evaluation") in [(row.module, row.when) for row in applied.rows if row.op]
        assert served(model, x) == {"cpu"}
        assert torch.equal(model(x), joined(model, x, name))
        assert torch.equal(deepcopy(model)(x), joined(model, x, name))
        torch.testing.assert_close(model(x), plain, rtol=1e-5, atol=1e-5)
        model.up.weight.mul_(0.5)
        assert torch.equal(model(x), joined(model, x, name))
        assert list(model.state_dict()) == list(mlp_of(Tanh()).state_dict())
        model.up.weight.mul_(2.0)
        applied.remove()
        assert type(model) is Mlp
        assert torch.equal(model(x), plain)


def test_a_layer_and_an_activation_with_gradients_and_in_training_are_called_as_modules() -> None:
    model, x = mlp_of(GELU()), torch.randn(5, SIZE, requires_grad=True)
    plain = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    apply(model)
    for mine, want in zip(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]), plain):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    with torch.no_grad():
        torch.manual_seed(1)
        model.train()
        dropped = (model(x) - model.down.bias).abs()
        model.eval()
        assert not torch.allclose(dropped, (model(x) - model.down.bias).abs())


@pytest.mark.parametrize("child", ["up", "act"])
def test_a_hook_that_comes_later_is_called(child: str) -> None:
    model, x = mlp_of(GELU()), torch.randn(5, SIZE)
    apply(model)
    seen: list[Any] = []
    with torch.no_grad():
        together = model(x)
        hook = getattr(model, child).register_forward_hook(lambda module, args, result: seen.append((args[0], result)))
        apart = model(x)
        assert len(seen) == 1
        sums = fusedops.linear(x, model.up.weight, model.up.bias)
        assert all(
            torch.equal(*each)
            for each in zip(
                seen[0], (x, sums) if child == "up" else (sums, fusedops.bias_gelu(sums, approximate="none"))
            )
        )
        torch.testing.assert_close(apart, together)
        hook.remove()
        assert torch.equal(model(x), together)


def test_a_layer_that_another_library_puts_in_is_called() -> None:
    class Twice(Linear):
        def forward(self, input: Any) -> Any:
            return 2 * super().forward(input)

    model, x = mlp_of(GELU()), torch.randn(5, SIZE)
    apply(model)
    other = Twice(SIZE, 320)
    other.load_state_dict(model.up.state_dict())
    model.up = other
    with torch.no_grad():
        want = model.down(GELU()(2 * torch.nn.functional.linear(x, other.weight, other.bias)))
        torch.testing.assert_close(model(x), want)


@pytest.mark.parametrize("model", [mlp_of(GELU(), WithResidual), mlp_of(Tanh())], ids=["residual", "tanh"])
def test_what_has_another_use_for_the_sums_is_left(model: Any) -> None:
    assert [row.module for row in apply(model, ops=["linear"]).rows if row.op] == ["Linear"]


def test_layers_of_models_have_their_activation() -> None:
    transformers = pytest.importorskip("transformers")
    whisper: dict[str, Any] = {"d_model": SIZE, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 300}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    widths = {"encoder_ffn_dim": 320, "decoder_ffn_dim": 320, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    models = [
        transformers.WhisperModel(transformers.WhisperConfig(**whisper, **heads, **widths)),
        transformers.T5EncoderModel(transformers.T5Config(d_model=SIZE, d_ff=320, num_layers=1, vocab_size=300)),
        transformers.BertModel(
            transformers.BertConfig(
                hidden_size=SIZE, intermediate_size=320, num_hidden_layers=1, num_attention_heads=4, vocab_size=300
            )
        ),
    ]
    with_activation = {
        row.module for each in models for row in apply(each).rows if (row.op, row.when) == ("linear", "evaluation")
    }
    assert with_activation == {"WhisperEncoderLayer", "WhisperDecoderLayer", "T5DenseActDense", "BertIntermediate"}

"""apply replaces a GELU by bias_gelu, recognised by its results; on other devices torch's one kernel stays."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module

import fusedops

transformers = pytest.importorskip("transformers")

from transformers.activations import ACT2FN  # noqa: E402

from fusedops.integrations.transformers import apply  # noqa: E402


class NoisyGELU(Module):
    """A GELU of several ops that draws a random number, and counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Compute it."""
        self.calls += 1
        torch.rand(1)
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


SEVERAL = ["gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh", "gelu_python"]
ONE: list[Any] = [torch.nn.GELU(), torch.nn.GELU("tanh"), ACT2FN["gelu"], ACT2FN["gelu_pytorch_tanh"]]


@pytest.mark.parametrize("activation", [*map(ACT2FN.__getitem__, SEVERAL), *ONE], ids=str)
def test_a_gelu_is_replaced(activation: Any) -> None:
    model, x = torch.nn.Sequential(activation), torch.randn(3, 8, requires_grad=True)
    plain = model(x)
    (gradient,) = torch.autograd.grad(plain.sum(), x)
    applied = apply(model)
    assert applied.ops == {"bias_gelu": 1}
    fusedops.reset_stats()
    y = model(x)
    assert [(each.op, each.calls) for each in fusedops.stats().counts] == [("bias_gelu", 1)]
    torch.testing.assert_close(y, plain)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], gradient)
    applied.remove()
    assert torch.equal(model(x), plain)


def test_on_another_device_and_in_a_graph_torchs_one_kernel_stays() -> None:
    model = torch.nn.Sequential(torch.nn.GELU("tanh"))
    apply(model)
    fusedops.reset_stats()
    model(torch.randn(3, 8, device="meta"))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(3, 8)), model[0](torch.ones(3, 8)))
    assert [(each.op, each.calls) for each in fusedops.stats().counts] == [("bias_gelu", 1)]


def test_another_gelu_is_left_with_the_reason() -> None:
    with pytest.warns(fusedops.FusedOpsWarning):
        (row,) = apply(torch.nn.Sequential(ACT2FN["quick_gelu"])).rows
    assert (row.op, row.family, row.left) == ("", "bias_gelu", "its results are not those of bias_gelu")


@pytest.mark.parametrize("module", [torch.nn.SiLU(), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Flatten()], ids=str)
def test_what_is_no_gelu_has_no_row(module: Module) -> None:
    with pytest.warns(fusedops.FusedOpsWarning):
        assert apply(torch.nn.Sequential(module)).rows == ()


def test_recognition_calls_a_copy_and_leaves_torchs_generator() -> None:
    noisy = NoisyGELU()
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    with pytest.warns(fusedops.FusedOpsWarning):
        (row,) = apply(torch.nn.Sequential(noisy, torch.nn.Dropout())).rows
    assert torch.equal(torch.rand(1), wanted)
    assert (row.op, row.left, noisy.calls) == ("", "its forward stores calls", 0)


@pytest.mark.parametrize("ops", [None, ["rms_norm", "bias_gelu"]], ids=str)
def test_the_activation_of_a_replaced_mlp_has_no_row(ops: Any) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.GemmaConfig(**sizes, **heads, hidden_act="gelu_new", hidden_activation="gelu_new")
    applied = apply(transformers.GemmaForCausalLM(config), ops=ops)
    found = [row.op for row in applied.rows if row.module == "NewGELUActivation"]
    assert found == ([] if ops is None else ["bias_gelu"])

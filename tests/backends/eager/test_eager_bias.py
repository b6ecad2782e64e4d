"""All eager kernels with a bias: sums, the exact form."""

from __future__ import annotations

import math

import pytest
import torch

from fusedops.testing import OPS
from fusedops_eager.bias import _gelu
from fusedops_eager.bias._gelu import gelu_forward


@pytest.mark.parametrize("name", ["bias_gelu", "bias_dropout", "bias_dropout_add"])
def test_the_bias_gradient_is_summed_in_float32(name: str) -> None:
    """4096 ones of bfloat16 summed in bfloat16 would be 256."""
    x, bias = torch.zeros(4096, 8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
    others = {"bias_gelu": {}, "bias_dropout": {"training": False}, "bias_dropout_add": {"residual": x, "p": 0.0}}
    y = OPS[name].function(x, bias, **others[name], backend="eager")
    y.backward(torch.full_like(y, 2.0 if name == "bias_gelu" else 1.0))
    assert torch.equal(bias.grad, torch.full((8,), 4096, dtype=torch.bfloat16))


def test_the_exact_form_elsewhere() -> None:
    """Not by F.gelu, which makes the tanh form of either on npu."""
    x = torch.linspace(-8, 8, 1001)
    y = _gelu._erf_form(x)
    torch.testing.assert_close(
        y.double(), 0.5 * x.double() * (1 + torch.erf(x.double() / math.sqrt(2))), atol=2e-6, rtol=1.3e-6
    )


@pytest.mark.parametrize("bias", [torch.tensor(-6.9375, dtype=torch.bfloat16), torch.full((8,), -6.9375)], ids=str)
def test_exact_gelu_beside_an_infinity_adds_the_bias_in_float32(bias: torch.Tensor) -> None:
    x = torch.tensor([65504.0, -math.inf, math.inf, math.nan, 1.0, 2.0, 3.0, 4.0], dtype=torch.float16)
    y = gelu_forward(x, bias, "none")
    assert y[0] == torch.tensor(65504.0 - 6.9375).to(y.dtype)
    assert y[2] == math.inf

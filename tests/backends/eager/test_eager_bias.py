"""All eager kernels with a bias: sizes of models, sums, memory, autocast, devices."""

from __future__ import annotations

import math

import pytest
import torch
from eager_memory import peak

from fusedops_eager.bias import _gelu
from fusedops_eager.bias._dropout import dropout_backward, dropout_forward
from fusedops_eager.bias._gelu import gelu_backward, gelu_forward


def test_the_bias_gradient_is_summed_in_float32() -> None:
    """4096 ones of bfloat16 summed in bfloat16 would be 256."""
    grad, bias = torch.ones(4096, 8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
    _, dbias = dropout_backward(grad, None, bias, 0.5, False, torch.bfloat16, (True, True))
    assert dbias is not None
    assert torch.equal(dbias, torch.full((8,), 4096, dtype=torch.bfloat16))
    _, dbias = gelu_backward(2 * grad, torch.zeros(4096, 8, dtype=torch.bfloat16), bias, "tanh", (False, True))
    assert dbias is not None
    assert torch.equal(dbias, torch.full((8,), 4096, dtype=torch.bfloat16))


def test_the_default_device_does_not_matter() -> None:
    x, bias, seed = torch.randn(6, 3000), torch.randn(3000), torch.tensor([5])
    with torch.device("meta"):
        for made in (
            gelu_forward(x, bias, "tanh"),
            *gelu_backward(x, x, bias, "tanh", (True, True)),
            dropout_forward(x, bias, x, 0.3, True, seed),
            *dropout_backward(x, seed, bias[:1], 0.3, True, torch.float32, (True, True)),
        ):
            assert made is not None
            assert made.is_cpu


def test_the_exact_form_elsewhere() -> None:
    """Not by F.gelu, which makes the tanh form of either on npu."""
    x = torch.linspace(-8, 8, 1001)
    y = _gelu._erf_form(x)
    torch.testing.assert_close(
        y.double(), 0.5 * x.double() * (1 + torch.erf(x.double() / math.sqrt(2))), atol=2e-6, rtol=1.3e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory(dtype: torch.dtype) -> None:
    """Memory beside the result depends on the slab, not on the tensor."""
    shape, seed = (16384, 1024) if dtype is torch.bfloat16 else (8192, 1024), torch.tensor([5])
    x, bias = torch.randn(shape).to(dtype), torch.randn(1024).to(dtype)
    size = x.numel() * x.element_size()
    assert size == 2**25
    assert peak(lambda: x + bias + 1, size) > 1.9
    assert peak(lambda: gelu_forward(x, bias, "tanh"), size) < 1.1
    assert peak(lambda: gelu_backward(x, x, bias, "tanh", (True, True)), size) < 1.25
    assert peak(lambda: dropout_forward(x, bias, None, 0.1, True, seed), size) < 1.25
    assert peak(lambda: dropout_forward(x, bias, x, 0.1, True, seed), size) < 1.25
    assert peak(lambda: dropout_backward(x, seed, bias, 0.1, True, dtype, (True, True)), size) < 1.35


@pytest.mark.parametrize("bias", [torch.tensor(-6.9375, dtype=torch.bfloat16), torch.full((8,), -6.9375)], ids=str)
def test_exact_gelu_beside_an_infinity_adds_the_bias_in_float32(bias: torch.Tensor) -> None:
    x = torch.tensor([65504.0, -math.inf, math.inf, math.nan, 1.0, 2.0, 3.0, 4.0], dtype=torch.float16)
    y = gelu_forward(x, bias, "none")
    assert y[0] == torch.tensor(65504.0 - 6.9375).to(y.dtype)
    assert y[2] == math.inf

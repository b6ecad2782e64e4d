"""The linear layers of GGUF files in diffusers: results, gradients of the input, memory, and what is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops
from fusedops.integrations._benchmark import peak_bytes
from fusedops.integrations.diffusers import apply
from fusedops.quantization import FORMATS, dequantize, quantize

gguf: Any = pytest.importorskip("gguf", reason="gguf is not installed")
layers: Any = pytest.importorskip("diffusers.quantizers.gguf.utils", reason="gguf is not installed")
N, K = 96, 512


def layer(format: str, dtype: torch.dtype = torch.float32, n: int = N, k: int = K) -> Any:
    made = layers.GGUFLinear(k, n, bias=True, compute_dtype=dtype)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) / k**0.5
    made.weight = layers.GGUFParameter(quantize(weight, format), quant_type=gguf.GGMLQuantizationType[format])
    return made.requires_grad_(False)


def x_of(rows: int, dtype: torch.dtype = torch.float32, k: int = K) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("format", [each for each in FORMATS if each in gguf.GGMLQuantizationType.__members__])
def test_the_result_is_that_of_the_exact_weight(format: str) -> None:
    model, x = nn.Sequential(layer(format)), x_of(5)
    plain = model(x)
    weight = dequantize(model[0].weight.as_tensor(), format)
    exact = x.double() @ weight.double().T + model[0].bias.double()
    applied = apply(model)
    assert applied.ops == {"quantized_linear": 1}
    result = model(x)
    assert (result - exact).abs().max() <= 2e-6 * exact.abs().max()
    assert (result - plain).abs().max() <= 2**-9 * exact.abs().max()  # diffusers rounds the weight to float16
    applied.remove()
    assert type(model[0]) is layers.GGUFLinear
    assert torch.equal(model(x), plain)


def test_the_input_has_a_gradient() -> None:
    model, x = nn.Sequential(layer("Q8_0")), x_of(3).requires_grad_()
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    apply(model)
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(gradient, plain, rtol=1e-3, atol=1e-3)


def test_no_temporary_has_the_size_of_the_weight() -> None:
    model, x = nn.Sequential(layer("Q4_0", n=1024, k=1024)), x_of(4, k=1024)
    plain = peak_bytes(lambda: model(x), "cpu")
    apply(model)
    model(x)
    assert plain >= 1024 * 1024 * 4
    assert peak_bytes(lambda: model(x), "cpu") <= 1024 * 1024 / 4


def test_another_dtype_is_left_to_the_layer() -> None:
    model = nn.Sequential(layer("Q8_0", torch.bfloat16))
    apply(model)
    fusedops.reset_stats()
    with pytest.raises(RuntimeError, match="dtype"):  # as before
        model(x_of(2))
    assert model(x_of(2, torch.bfloat16)).dtype is torch.bfloat16
    assert [row.op for row in fusedops.stats().counts] == ["quantized_linear"]


def test_other_formats_and_an_own_forward_are_left() -> None:
    other = layer("Q8_0")
    kind = gguf.GGMLQuantizationType.Q2_K
    other.weight = layers.GGUFParameter(torch.zeros(N, 176, dtype=torch.uint8), quant_type=kind)
    changed = layer("Q8_0")
    changed.forward = changed.forward
    with pytest.warns(fusedops.FusedOpsWarning):
        applied = apply(nn.Sequential(other, changed))
    texts = [row.left for row in applied.rows]
    reason = f"its weight is in Q2_K, expected one of {', '.join(FORMATS)}"
    assert texts == [reason, "another library has replaced its forward"]

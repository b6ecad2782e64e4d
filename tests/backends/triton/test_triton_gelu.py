"""The bias_gelu kernels of the triton backend, run by Triton's interpreter on a CPU, against float64.

For what the interpreter shows and what it does not, see test_triton_softmax.py.
"""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from fusedops.ops.bias import bias_gelu
from fusedops_triton.bias._bias_gelu import gelu_backward, gelu_forward

FORMS = ("tanh", "none")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of what overflows, a GPU does not
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gelu_of_large_numbers(dtype: torch.dtype, approximate: str) -> None:
    high = torch.finfo(dtype).max
    x = torch.tensor([high, 1e18, 1e4, 300.0, 20.0, -20.0, -300.0, -1e4, -1e18, -high], dtype=dtype)
    y = gelu_forward(x, None, approximate)
    assert torch.equal(y[:5], x[:5])
    assert (y[5:].abs() < 1e-37).all()
    dx, _ = gelu_backward(torch.ones_like(x), x, None, approximate, (True, False))
    assert dx is not None
    assert (dx[1:5] == 1).all()
    assert (dx[5:9].abs() < 1e-37).all()
    odd = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    # not what torch gives: for "none" that is nan where a CPU has AVX-512, and inf elsewhere
    want = torch.tensor([math.nan, math.inf, math.nan], dtype=dtype)
    torch.testing.assert_close(gelu_forward(odd, None, approximate), want, equal_nan=True)


def test_gelu_in_the_left_tail_is_good_to_its_own_size() -> None:
    # in float32 1 + tanh(z) is 0 from -5.1 on, and the slope of tanh, 1 - tanh(z)**2
    x = torch.linspace(-8, -4, 64)
    u = x.double().requires_grad_()
    want = u * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))
    torch.testing.assert_close(gelu_forward(x, None, "tanh").double(), want.detach(), rtol=1e-5, atol=0.0)
    (slope,) = torch.autograd.grad(want.sum(), u)
    dx, _ = gelu_backward(torch.ones_like(x), x, None, "tanh", (True, False))
    assert dx is not None
    torch.testing.assert_close(dx.double(), slope, rtol=1e-5, atol=0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as above
@pytest.mark.parametrize("approximate", FORMS)
def test_gelu_of_numbers_of_every_size(approximate: str) -> None:
    # each of the 65536 upper halves of a float32, all signs and exponents, with some lower half
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    x = (high + torch.randint(2**16, high.shape, dtype=torch.int32)).view(torch.float32)
    x = x[x.isfinite() & (x.abs() < 1e12)]  # u * u is finite, so that the slope is
    u = x.double().requires_grad_()
    want = bias_gelu.OP.reference(u, None, approximate)
    (slope,) = torch.autograd.grad(want.sum(), u)
    y = gelu_forward(x, None, approximate).double()
    assert ((y - want).abs() <= 4e-7 * u.abs() + 1e-38).all()  # a denormal has fewer places
    dx, _ = gelu_backward(torch.ones_like(x), x, None, approximate, (True, False))
    assert dx is not None
    assert ((dx.double() - slope).abs() <= 1e-6).all()

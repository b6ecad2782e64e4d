"""The eager kernels of bias_gelu against their definition in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from eager_bias_cases import DTYPES, INF, MIXED, NAN, SHAPES, Unchanged, close, fresh, gelu_of, layouts
from torch import Tensor

from fusedops.testing import OPS
from fusedops_eager import _gelu
from fusedops_eager._gelu import gelu_backward, gelu_forward


def check_gelu(x: Tensor, bias: Tensor | None, form: str, grad: Tensor | None = None) -> None:
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    grad = torch.randn(x.shape).to(dtype) if grad is None else grad
    unchanged = Unchanged(x, bias, grad)
    wide_x = x.double().detach().requires_grad_()
    wide_bias = None if bias is None else bias.double().detach().requires_grad_()
    wanted = gelu_of(wide_x if wide_bias is None else wide_x + wide_bias, form)
    inputs = [wide_x] if wide_bias is None else [wide_x, wide_bias]
    gradients = torch.autograd.grad(wanted, inputs, grad.double())

    y = gelu_forward(x, bias, form)
    fresh(y, x, bias)
    assert y.shape == x.shape
    close(y, wanted.detach(), dtype)
    for needs in ((True, True), (True, False), (False, True)):
        dx, dbias = gelu_backward(grad, x, bias, form, needs)
        assert (dx is not None) == needs[0]
        assert (dbias is not None) == (needs[1] and bias is not None)
        if dx is not None:
            fresh(dx, x, grad)
            assert dx.shape == x.shape
            close(dx, gradients[0], x.dtype, 2)
        if bias is not None and dbias is not None:
            fresh(dbias, bias, dx, grad)
            assert dbias.shape == bias.shape
            close(dbias, gradients[1], bias.dtype, 8)
    unchanged.check()


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize("form", ["tanh", "none"])
@pytest.mark.parametrize(("shape", "bias_shape"), SHAPES)
def test_gelu(shape: tuple[int, ...], bias_shape: tuple[int, ...] | None, form: str) -> None:
    for x_dtype, bias_dtype in MIXED:
        for x in layouts(shape, x_dtype) if x_dtype is bias_dtype else [torch.randn(shape).to(x_dtype)]:
            check_gelu(x, None if bias_shape is None else torch.randn(bias_shape).to(bias_dtype), form)


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_with_gradients_and_biases_of_any_stride(dtype: torch.dtype) -> None:
    for grad, bias in itertools.product(layouts((6, 50), dtype), layouts((6, 50), dtype)):
        check_gelu(torch.randn(6, 50).to(dtype), bias, "tanh", grad)
        check_gelu(torch.randn(6, 50).to(dtype), bias[0], "none", grad)


@pytest.mark.parametrize("form", ["tanh", "none"])
def test_gelu_of_extremes(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large numbers are as torch has them; 1e14 cubed is beyond float32, and its gradient is still 1."""
    monkeypatch.setattr(_gelu, "_MIN_SLAB_ELEMENTS", 0)
    x = torch.tensor([0.0, -0.0, 30, -30, 1e14, -1e14, 1e18, -1e18, INF, -INF, NAN, 1e-40])
    y = gelu_forward(x, None, form)
    # not F.gelu, which torch computes wrongly for inf with AVX-512
    want = OPS["bias_gelu"].reference(x.double(), None, form).float()
    torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-7, equal_nan=True)
    dx, _ = gelu_backward(torch.ones_like(x), x, None, form, (True, False))
    assert dx is not None
    want = torch.tensor([0.5, 0.5, 1, 0, 1, 0, 1, 0])
    torch.testing.assert_close(dx[:8], want, rtol=1e-6, atol=1e-7)
    rows, bias = x[:8].expand(3, 8), torch.zeros(8)
    for needs in ((True, True), (False, True)):
        dx, dbias = gelu_backward(torch.ones(3, 8), rows, bias, form, needs)
        assert dbias is not None
        torch.testing.assert_close(dbias, 3 * want, rtol=1e-6, atol=1e-7)
        if dx is not None:
            torch.testing.assert_close(dx, want.expand(3, 8), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("slabs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["tanh", "none"])
def test_gelu_of_the_largest_number_is_that_number(
    form: str, dtype: torch.dtype, slabs: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if slabs:
        monkeypatch.setattr(_gelu, "_MIN_SLAB_ELEMENTS", 0)
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, 1.0, INF] * 9, dtype=dtype)
    y = gelu_forward(x.to(device), None, form).cpu()
    assert torch.equal(y.view(9, 4)[:, [0, 3]], x.view(9, 4)[:, [0, 3]])
    assert not y.view(9, 4)[:, 1].any()


def test_gelu_of_large_numbers_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 1e12 the cube is finite, and nothing is done again."""
    monkeypatch.setattr(_gelu, "_MIN_SLAB_ELEMENTS", 0)
    monkeypatch.setattr(Tensor, "clamp_", lambda *_: pytest.fail("done again"))
    x = torch.tensor([0.0, -0.0, 1e-40, 5, -5, 9, -9, 12, -12, 30, -30, 1e8, -1e8, 1e12, -1e12]).expand(3, 15)
    grad = torch.tensor([1.0, -1e30, 1e-30])[:, None].expand_as(x)
    dx, dbias = gelu_backward(grad, x, torch.zeros(15), "tanh", (True, True))
    want = torch.ops.aten.gelu_backward(grad.double(), x.double(), approximate="tanh")
    assert dx is not None
    assert dbias is not None
    torch.testing.assert_close(dx.double() / grad, want / grad, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(dbias.double() / -1e30, want.sum(0) / -1e30, rtol=2e-5, atol=1e-6)


def test_an_infinite_gradient_of_gelu_is_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gelu, "_MIN_SLAB_ELEMENTS", 0)
    x, grad = torch.randn(4, 6), torch.randn(4, 6)
    grad[0, 0], grad[1, 1], grad[2, 2] = INF, -INF, NAN
    dx, dbias = gelu_backward(grad, x, torch.zeros(6), "tanh", (True, True))
    want = torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    assert dx is not None
    torch.testing.assert_close(dx, want, rtol=2e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(dbias, want.sum(0), rtol=2e-5, atol=1e-6, equal_nan=True)


def test_small_gelu_is_the_large_one() -> None:
    x, bias = torch.randn(8, 100), torch.randn(100)
    for form in ("tanh", "none"):
        large = gelu_forward(x.repeat(3, 1), bias, form)
        torch.testing.assert_close(gelu_forward(x, bias, form), large[:8], rtol=1e-6, atol=1e-6)

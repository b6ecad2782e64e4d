"""The kernels' results against float64, for dtypes, shapes, strides and special values."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_values import DTYPES, LAYOUTS, SHAPES, assert_close, rounded
from torch import Tensor

import fusedops
from fusedops.testing import keep_mask

pytestmark = pytest.mark.usefixtures("on_cpu")


def softmax64(x: Tensor, masked: Tensor, scale: float) -> Tensor:
    scores = (x.double() * scale).masked_fill(masked, -math.inf)
    dead = masked.all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(masked, 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_softmax(dtype: torch.dtype, layout: str, causal: bool) -> None:
    for shape in SHAPES:
        x = LAYOUTS[layout](rounded(shape, dtype)) if math.prod(shape) else rounded(shape, dtype)
        for mask_shape in (None, shape, shape[-2:], (*shape[:-1], 1), (shape[-1],), (1, 1), ()):
            if mask_shape is not None and len(mask_shape) > len(shape):
                continue
            mask = None if mask_shape is None else rounded(mask_shape, torch.float32, 1) > 0.3
            masked = torch.zeros(shape, dtype=torch.bool) if mask is None else mask.expand(shape)
            if causal:
                masked = masked | torch.ones(shape[-2:], dtype=torch.bool).triu(1)
            leaf = x.detach().requires_grad_()
            y = fusedops.scaled_masked_softmax(leaf, mask, 0.7, causal=causal)
            assert y.dtype is dtype
            assert_close(y.detach(), softmax64(x, masked, 0.7))
            assert not y.detach()[masked].any()
            grad = rounded(shape, dtype, 2)
            (dx,) = torch.autograd.grad(y, leaf, grad)
            p, g = y.detach().double(), grad.double()
            assert_close(dx.contiguous(), 0.7 * p * (g - (g * p).sum(-1, keepdim=True)))


@pytest.mark.parametrize(
    "mask",
    [
        torch.rand(2, 6, 8, generator=torch.Generator().manual_seed(0)).gt(0.5).mT.contiguous().mT,
        torch.rand(2, 1, 16, generator=torch.Generator().manual_seed(0)).gt(0.5)[..., ::2].expand(2, 6, 8),
        torch.rand(6, 1, generator=torch.Generator().manual_seed(0)).gt(0.5).expand(6, 8),
        torch.randint(0, 3, (2, 6, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 2, 255, 1, 128, 0, 0, 4], dtype=torch.uint8).view(torch.bool),
    ],
    ids=["transposed", "cut and expanded", "one a row, expanded", "uint8", "bool of other bytes"],
)
def test_masks_of_any_layout(mask: Tensor) -> None:
    x = rounded((2, 6, 8), torch.float32)
    masked = mask.contiguous().view(torch.uint8).ne(0).expand(x.shape)
    assert_close(fusedops.scaled_masked_softmax(x, mask), softmax64(x, masked, 1.0))


def test_many_dimensions() -> None:
    x = rounded((2, *[1] * 20, 3, 5), torch.float32)
    mask = rounded((2, *[1] * 21, 5), torch.float32, 1) > 0
    assert_close(fusedops.scaled_masked_softmax(x, mask), softmax64(x, mask.expand(x.shape), 1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_masked_positions_do_not_leak(dtype: torch.dtype, value: float) -> None:
    x = rounded((2, 9, 41), dtype)
    mask = rounded((2, 9, 41), torch.float32, 1) > 0
    mask[0, 3] = True
    spoiled = x.masked_fill(mask, value)
    clean = fusedops.scaled_masked_softmax(x, mask)
    assert torch.equal(fusedops.scaled_masked_softmax(spoiled, mask), clean)
    assert not clean[0, 3].any()


def test_nan_and_inf_stay_in_their_row() -> None:
    x = rounded((4, 37), torch.float32)
    x[0, 5], x[1, 6], x[2] = math.nan, math.inf, -math.inf
    y = fusedops.scaled_masked_softmax(x)
    assert y[:3].isnan().all()
    assert_close(y[3:], torch.softmax(x[3:].double(), -1))


@pytest.mark.parametrize("scale", [0.0, -2.0, 3e38, -3e38, 2**62])
def test_scales(scale: float) -> None:
    x = rounded((3, 21), torch.float32)
    wanted = torch.softmax(x * scale, -1).double()
    assert_close(fusedops.scaled_masked_softmax(x, None, scale), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_bias_gelu(dtype: torch.dtype, layout: str, approximate: str) -> None:
    for shape in [*SHAPES, (), (7,), (5000, 3), (3000, 70)]:
        x = rounded(shape, dtype) * 2
        if len(shape) > 1 and x.numel():
            x = LAYOUTS[layout](x)
        for bias_shape in (None, shape[-1:], (1,), ()):
            if bias_shape == (1,) and not shape:
                continue
            bias = None if bias_shape is None else rounded(bias_shape, dtype, 1).requires_grad_()
            leaf = x.detach().requires_grad_()
            y = fusedops.bias_gelu(leaf, bias, approximate=approximate)
            wide_x = x.detach().double().requires_grad_()
            wide_bias = None if bias is None else bias.detach().double().requires_grad_()
            u = wide_x if wide_bias is None else wide_x + wide_bias
            wanted = torch.nn.functional.gelu(u, approximate=approximate)
            assert_close(y.detach(), wanted.detach())
            grad = rounded(shape, dtype, 2)
            inputs = [t for t in (leaf, bias) if t is not None]
            wide = [t for t in (wide_x, wide_bias) if t is not None]
            for got, want in zip(
                torch.autograd.grad(y, inputs, grad), torch.autograd.grad(wanted, wide, grad.double()), strict=True
            ):
                assert_close(got, want, scale=max(1.0, math.sqrt(u.numel() / max(got.numel(), 1))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("p", [0.0, 1e-12, 0.1, 0.5, 0.97, 1.0])
def test_bias_dropout_add(dtype: torch.dtype, layout: str, p: float) -> None:
    for shape in [*SHAPES, (), (7,), (5000, 3)]:
        x, residual = rounded(shape, dtype), rounded(shape, dtype, 1)
        if len(shape) > 1 and x.numel():
            x, residual = LAYOUTS[layout](x), LAYOUTS[layout](residual)
        keep = keep_mask(torch.tensor([77]), p, shape)
        scale = 0.0 if p == 1 else 1 / (1 - p)
        for bias_shape in (None, shape[-1:]):
            bias = None if bias_shape is None else rounded(bias_shape, dtype, 2).requires_grad_()
            leaf = x.detach().requires_grad_()
            u = x.double() if bias is None else x.double() + bias.detach().double()
            dropped = torch.where(keep, u * scale, 0)
            grad = rounded(shape, dtype, 3)
            du = torch.where(keep, grad.double() * scale, 0)
            for with_residual in (False, True):
                if with_residual:
                    y = fusedops.bias_dropout_add(leaf, bias, residual, p, seed=77)
                else:
                    y = fusedops.bias_dropout(leaf, bias, p, seed=77)
                assert_close(y.detach(), dropped + residual.double() if with_residual else dropped)
                inputs = [t for t in (leaf, bias) if t is not None]
                gradients = torch.autograd.grad(y, inputs, grad)
                assert_close(gradients[0].contiguous(), du)
                if bias is not None:
                    summed = du.sum_to_size(bias.shape)
                    assert_close(gradients[1], summed, scale=max(1.0, math.sqrt(u.numel() / max(bias.numel(), 1))))


def test_a_dropped_nan_is_dropped() -> None:
    x = torch.full((4, 100), math.nan)
    y = fusedops.bias_dropout(x, None, 0.5, seed=3)
    keep = keep_mask(torch.tensor([3]), 0.5, x.shape)
    assert torch.equal(y.isnan(), keep)
    assert not y[~keep].any()

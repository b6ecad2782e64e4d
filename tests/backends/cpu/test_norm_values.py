"""The norms' results against float64, for dtypes, shapes, strides, special values, and tensors beyond the caches."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_values import DTYPES, LAYOUTS, assert_close, rounded
from torch import Tensor

import fusedops

pytestmark = pytest.mark.usefixtures("on_cpu")

SHAPES = [(1, 1), (3, 5), (2, 7, 33), (2, 3, 16, 64), (4, 130), (1, 4099), (40, 1000), (0, 5), (3, 40_001)]
EPS = 1e-3


def norm64(s: Tensor, weight: Tensor | None, bias: Tensor | None, centered: bool) -> Tensor:
    s = s - s.mean(-1, keepdim=True) if centered else s
    y = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + EPS)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def call(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, centered: bool
) -> list[Tensor]:
    if centered:
        if residual is None:
            return [fusedops.layer_norm(x, weight, bias, EPS)]
        return [*fusedops.add_layer_norm(x, residual, weight, bias, EPS)]
    if residual is None:
        return [fusedops.rms_norm(x, weight, EPS)]
    return [*fusedops.add_rms_norm(x, residual, weight, EPS)]


def check(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, centered: bool, scale: float = 2.0
) -> None:
    leaves = [None if t is None else t.detach().requires_grad_() for t in (x, residual, weight, bias)]
    outputs = call(*leaves, centered)
    assert [y.dtype for y in outputs] == [x.dtype] * len(outputs)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in leaves]
    s = wide[0] if wide[1] is None else wide[0] + wide[1]
    if residual is not None:  # the norm is that of the rounded sum
        assert_close(outputs[1].detach(), s.detach())
        s = s + (outputs[1].double() - s).detach()
    wanted = [norm64(s, wide[2], wide[3], centered), s][: len(outputs)]
    for got, want in zip(outputs, wanted, strict=True):
        assert_close(got.detach(), want.detach(), scale)
    grads = [rounded(tuple(x.shape), x.dtype, 7 + at) for at in range(len(outputs))]
    ours = torch.autograd.grad(outputs, [t for t in leaves if t is not None], grads)
    theirs = torch.autograd.grad(wanted, [t for t in wide if t is not None], [g.double() for g in grads])
    for got, want in zip(ours, theirs, strict=True):
        rows = max(1, x.numel() // max(1, got.numel()))
        assert_close(got.contiguous(), want, scale * 4 * math.sqrt(rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("add", [False, True], ids=["norm", "add"])
def test_norms(dtype: torch.dtype, layout: str, centered: bool, add: bool) -> None:
    for shape in SHAPES:
        x, residual = rounded(shape, dtype), rounded(shape, dtype, 1)
        if x.numel():
            x, residual = LAYOUTS[layout](x), LAYOUTS[layout](residual)
        for weight_dtype in (dtype, torch.float32, None):
            weight = None if weight_dtype is None else rounded(shape[-1:], weight_dtype, 2)
            bias = None if weight_dtype is None or not centered else rounded(shape[-1:], dtype, 3)
            check(x, residual if add else None, weight, bias, centered)


@pytest.mark.parametrize("shape", [(2048, 4096), (90_000, 96), (131_072, 65)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_beyond_the_caches_have_the_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Above 32 MiB results are stored past the caches: the rows are those of a call of a few rows."""
    count = 1 if dtype is torch.float32 else 2
    shape = (shape[0] * count, shape[1])
    x, residual = rounded(shape, dtype), rounded(shape, dtype, 1)
    weight = rounded(shape[1:], torch.float32, 2)
    grad = rounded(shape, dtype, 3)
    some = slice(shape[0] - 40, shape[0])

    def run(rows: slice) -> list[Tensor]:
        leaves = [t[rows].detach().requires_grad_() for t in (x, residual)]
        y, s = fusedops.add_rms_norm(*leaves, weight)
        dx, dresidual = torch.autograd.grad((y, s), leaves, (grad[rows], grad[rows]))
        return [y.detach(), s.detach(), dx, dresidual, fusedops.layer_norm(x[rows], weight)]

    for large, small in zip(run(slice(None)), run(some), strict=True):
        assert torch.equal(large[some], small)


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_rows_without_columns(centered: bool) -> None:
    x = torch.empty(3, 0, requires_grad=True)
    weight = torch.empty(0, requires_grad=True)
    (y,) = call(x, None, weight, None, centered)
    assert y.shape == (3, 0)
    assert [g.shape for g in torch.autograd.grad(y, (x, weight), y.detach())] == [(3, 0), (0,)]


def test_no_rows_have_a_gradient_of_zeros() -> None:
    x, weight, bias = torch.empty(0, 5, requires_grad=True), *(torch.ones(5, requires_grad=True) for _ in range(2))
    y = fusedops.layer_norm(x, weight, bias)
    for grad in torch.autograd.grad(y, (weight, bias), y.detach()):
        assert torch.equal(grad, torch.zeros(5))


def test_nan_and_inf_stay_in_their_row() -> None:
    x = rounded((4, 37), torch.float32)
    x[0, 5], x[1, 6] = math.nan, math.inf
    for centered in (False, True):
        (y,) = call(x, None, None, None, centered)
        assert y[0].isnan().all()
        assert y[1, 6].isnan()
        assert_close(y[2:], norm64(x[2:].double(), None, None, centered), 2.0)


def test_a_mean_far_from_zero() -> None:
    """The variance is that of the differences from the mean: the squares of the numbers would cancel."""
    x = rounded((5, 777), torch.float32) + 256
    assert_close(fusedops.layer_norm(x), torch.nn.functional.layer_norm(x.double(), (777,)), 20.0)


def test_residuals_of_another_dtype_have_their_gradients() -> None:
    """Eager computes such a forward; the backward kernels take it where s is float32."""
    for dtypes in [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16)]:
        x, residual = rounded((6, 40), dtypes[0]), rounded((6, 40), dtypes[1], 1)
        grads, results = (rounded((6, 40), dtypes[0], 2), rounded((6, 40), torch.float32, 3)), []
        for backend in ("cpu", "eager"):
            leaves = [t.detach().requires_grad_() for t in (x, residual)]
            y, s = fusedops.add_layer_norm(*leaves, backend="eager")
            with fusedops.use(backend, fallback="raise"):
                results.append(torch.autograd.grad((y, s), leaves, grads))
        for ours, theirs in zip(*results, strict=True):
            assert ours.dtype is theirs.dtype
            assert_close(ours, theirs.double(), 4.0)

"""The eager kernels of bias_dropout and bias_dropout_add against their definitions in float64."""

from __future__ import annotations

import pytest
import torch
from eager_bias_cases import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    INF,
    MIXED,
    NAN,
    SHAPES,
    Unchanged,
    close,
    fresh,
    layouts,
    words_of,
)
from torch import Tensor

import fusedops
from fusedops_eager._dropout import dropout_backward, dropout_forward


def check_dropout(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, grad: Tensor | None = None
) -> None:
    dtype = residual.dtype if residual is not None else x.dtype
    if residual is None and bias is not None:
        dtype = torch.promote_types(dtype, bias.dtype)
    grad = torch.randn(x.shape).to(dtype) if grad is None else grad
    seed = torch.tensor([2**40 + 17])
    unchanged = Unchanged(x, bias, residual, grad, seed)
    keep = torch.from_numpy(words_of(2**40 + 17, 0, x.numel()) >= round(p * 2**32)).view(x.shape)
    scale = 1 / (1 - p) if p < 1 else 0.0
    taken = [None if t is None else t.to(dtype if residual is not None else t.dtype).double() for t in (x, bias)]
    u = taken[0] if taken[1] is None else taken[0] + taken[1]
    y = dropout_forward(x, bias, residual, p, True, seed)
    fresh(y, x, bias, residual)
    wanted = torch.where(keep, u * scale, 0.0)
    close(y, wanted if residual is None else residual.double() + wanted, dtype, 4)
    assert (y == (0 if residual is None else residual))[~keep].all()

    arithmetic = F64 if dtype is F64 else F32  # what is float64 need be no better than this
    du = torch.where(keep, grad.double() * scale, 0.0)
    for needs in ((True, True), (True, False), (False, True)):
        dx, dbias = dropout_backward(grad, seed, bias, p, True, x.dtype, needs)
        assert (dx is not None) == needs[0]
        assert (dbias is not None) == (needs[1] and bias is not None)
        if dx is not None:
            fresh(dx, grad)
            close(dx.to(arithmetic), du, arithmetic, 4) if x.dtype is F64 else close(dx, du, x.dtype, 4)
            assert torch.equal(dx != 0, keep & (grad != 0))
        if bias is not None and dbias is not None:
            fresh(dbias, grad, bias, dx)
            assert dbias.shape == bias.shape
            sums = du.sum_to_size(bias.shape)
            close(dbias.to(arithmetic), sums, arithmetic, 8) if bias.dtype is F64 else close(dbias, sums, bias.dtype, 8)
    unchanged.check()


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize(("shape", "bias_shape"), SHAPES)
def test_dropout(shape: tuple[int, ...], bias_shape: tuple[int, ...] | None) -> None:
    for x_dtype, bias_dtype in MIXED:
        for x in layouts(shape, x_dtype) if x_dtype is bias_dtype else [torch.randn(shape).to(x_dtype)]:
            bias = None if bias_shape is None else torch.randn(bias_shape).to(bias_dtype)
            check_dropout(x, bias, None, 0.3)


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize(("shape", "bias_shape"), SHAPES)
def test_dropout_add(shape: tuple[int, ...], bias_shape: tuple[int, ...] | None) -> None:
    mixed = [(BF16, F32), (F32, BF16), (F64, F16), (F16, F64)]
    for x_dtype, residual_dtype in [*((dtype, dtype) for dtype in DTYPES), *mixed]:
        bias_dtype = torch.promote_types(x_dtype, residual_dtype)
        every = x_dtype is residual_dtype is F32
        for residual in layouts(shape, residual_dtype) if every else [torch.randn(shape).to(residual_dtype)]:
            bias = None if bias_shape is None else torch.randn(bias_shape).to(bias_dtype)
            check_dropout(torch.randn(shape).to(x_dtype), bias, residual, 0.6)


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize("p", [1e-12, 0.1, 0.5, 0.9, 1 - 1e-5, 1 - 1e-12, 1.0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_probability(dtype: torch.dtype, p: float) -> None:
    for residual in (None, torch.randn(3, 50).to(dtype)):
        scale = torch.ones(3, 50) / max(1.0, 1 / (1 - p) if p < 1 else 1.0)  # so that nothing overflows
        check_dropout(scale.to(dtype), torch.zeros(50).to(dtype), residual, p, scale.to(dtype))


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropped_is_exact_whatever_it_was(dtype: torch.dtype) -> None:
    seed, residual = torch.tensor([4]), torch.randn(6, 50).to(dtype)
    keep = torch.from_numpy(words_of(4, 0, 300) >= 2**31).view(6, 50)
    for junk in (NAN, INF, -INF, torch.finfo(dtype).max):
        x = torch.randn(6, 50).to(dtype)
        dirty = torch.where(keep, x, junk).to(dtype)
        assert torch.equal(
            dropout_forward(dirty, None, None, 0.5, True, seed)[~keep], torch.zeros(int((~keep).sum()), dtype=dtype)
        )
        assert torch.equal(dropout_forward(dirty, None, residual, 0.5, True, seed)[~keep], residual[~keep])
        all_junk = torch.full((6, 50), junk, dtype=dtype)
        assert torch.equal(dropout_forward(all_junk, None, None, 1.0, True, seed), torch.zeros(6, 50, dtype=dtype))
        y = dropout_forward(all_junk, None, residual, 1.0, True, seed)
        assert torch.equal(y, residual)
        fresh(y, residual)
        dx, dbias = dropout_backward(dirty, seed, torch.randn(50).to(dtype), 0.5, True, dtype, (True, True))
        assert dx is not None
        assert dbias is not None
        assert (dx[~keep] == 0).all()
        assert dbias.isfinite().all()
        dx, dbias = dropout_backward(all_junk, seed, torch.randn(50).to(dtype), 1.0, True, dtype, (True, True))
        assert dx is not None
        assert dbias is not None
        assert (dx == 0).all()
        assert (dbias == 0).all()
    kept = dropout_forward(torch.full((6, 50), NAN, dtype=dtype), None, None, 0.5, True, seed)
    assert torch.equal(kept.isnan(), keep)


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize("dtype", DTYPES)
def test_where_nothing_is_dropped(dtype: torch.dtype) -> None:
    seed = torch.tensor([4])
    for p, training, given in (
        (0.0, True, seed),
        (0, True, seed),
        (0.3, False, seed),
        (0.0, True, None),
        (1.0, False, None),
    ):
        for x in layouts((6, 50), dtype):
            bias, residual, grad = (torch.randn(size).to(dtype) for size in ((50,), (6, 50), (6, 50)))
            u = x.double() + bias.double()
            close(dropout_forward(x, bias, None, p, training, given), u.to(dtype).double(), dtype)
            close(dropout_forward(x, bias, residual, p, training, given), u + residual.double(), dtype, 2)
            plain = dropout_forward(x, None, None, p, training, given)
            assert torch.equal(plain, x)
            fresh(plain, x)
            dx, dbias = dropout_backward(grad, given, bias, p, training, dtype, (True, True))
            assert dx is not None
            assert torch.equal(dx, grad)
            fresh(dx, grad)
            assert dbias is not None
            close(dbias, grad.double().sum(0), dtype, 4)
            for given_grad in layouts((6, 50), dtype):  # that of the bias alone, as autograd asks for it
                none, alone = dropout_backward(given_grad, given, bias, p, training, dtype, (False, True))
                assert none is None
                assert alone is not None
                close(alone, given_grad.double().sum(0), dtype, 4)


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("training", [True, False])
def test_a_result_without_bias_and_dropout_is_a_copy(device: str, training: bool) -> None:
    x = torch.ones(6, 50, device=device)
    y = dropout_forward(x, None, None, 0.0, training, None)
    y.zero_()
    assert x.cpu().all(), "a change of the result changed x"


def test_forward_and_backward_use_one_mask() -> None:
    x, bias, residual = torch.randn(300, 1000, requires_grad=True), torch.randn(1000), torch.randn(300, 1000)
    for call in (
        lambda: fusedops.bias_dropout(x, bias, 0.4, backend="eager"),
        lambda: fusedops.bias_dropout_add(x, bias, residual, 0.4, backend="eager") - residual,
    ):
        y = call()
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(dx == 0, y == 0)
        assert torch.equal(dx[dx != 0], torch.full_like(dx[dx != 0], 1 / 0.6))


def test_the_generator_governs() -> None:
    x = torch.ones(4000)

    def draw(seed: int | None = None) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        return fusedops.bias_dropout(x, p=0.5, backend="eager")

    first = draw(1)
    assert not torch.equal(first, draw())
    assert torch.equal(first, draw(1))
    assert not torch.equal(first, draw(2))
    with torch.random.fork_rng():
        inside = draw(7)
    assert torch.equal(draw(7), inside)
    state = torch.get_rng_state()
    fusedops.bias_dropout(x, p=0.0, backend="eager")
    fusedops.bias_dropout_add(x, None, x, 0.5, training=False, backend="eager")
    fusedops.bias_dropout(x, p=0.5, seed=3, backend="eager")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_float32_residual_is_not_narrowed() -> None:
    x, bias, residual = torch.randn(50, 70).to(BF16), torch.randn(70).to(BF16), torch.randn(50, 70)
    seed, keep = torch.tensor([5]), torch.from_numpy(words_of(5, 0, 3500) >= 2**31).view(50, 70)
    y = dropout_forward(x, bias, residual, 0.5, True, seed)
    exact = residual.double() + torch.where(keep, (x.double() + bias.double()) * 2, 0.0)
    close(y, exact, F32, 2)
    # and the other way: x is rounded to the residual's dtype before anything is added
    x, residual = 100 + torch.randn(50, 70), torch.zeros(50, 70, dtype=BF16)
    assert torch.equal(dropout_forward(x, None, residual, 0.5, False, None), x.to(BF16))
    y = dropout_forward(x, torch.full((70,), -100.0), residual, 0.5, False, None)
    assert torch.equal(y, (x.to(BF16).float() - 100).to(BF16))

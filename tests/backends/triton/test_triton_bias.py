"""Shapes and layouts of biases, sums in parts, and shares in the triton kernels."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from right import assert_right
from triton_cases import seed_of

import fusedops
from fusedops_triton._jit import _bias
from fusedops_triton._jit._bias import locate, unit
from fusedops_triton.bias._bias_dropout import dropout_backward
from fusedops_triton.bias._bias_gelu import gelu_backward
from fusedops_triton.launch.settings import share_columns, tile


def test_every_shape_of_bias_is_found() -> None:
    shape = torch.Size((2, 1, 3, 2, 5))
    kinds = set()
    for rank in range(6):
        for kept in itertools.product((False, True), repeat=rank):
            bias = torch.randn([size if keep else 1 for size, keep in zip(shape[5 - rank :], kept, strict=True)])
            place = locate(bias, shape)
            at = torch.arange(shape.numel())
            if "tail" in place.kind:
                at = at % (place.sizes[0] * place.unit)
            assert place.tensor is not None
            assert torch.equal(place.tensor.flatten()[at].view(shape), bias.expand(shape)), (kept, place)
            kinds.add(place.kind)
    assert kinds == {"all", "tail"}


DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# ------------------------------------------------------------------------------------------------------ sums of columns


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("parts")
def test_sums_in_parts(dtype: torch.dtype) -> None:
    x, bias = torch.randn(51, 20).to(dtype), torch.randn(20).to(dtype)
    share = share_columns(51, 20, dtype.itemsize)
    assert (share.parts, share.steps) == (4, 4)
    with fusedops.use("triton", fallback="raise"):
        assert_right("bias_gelu", x, bias)
        assert_right("bias_dropout", x, bias, 0.5, seed=7)
    grad, both = torch.randn(51, 20).to(dtype), (True, True)
    for backward, args in (
        (gelu_backward, (x, bias, "tanh")),
        (dropout_backward, (seed_of(7), bias, 0.5, True, dtype)),
    ):
        alone = backward(grad, *args, (False, True))
        assert alone[0] is None
        assert torch.equal(alone[1], backward(grad, *args, both)[1])


@pytest.mark.parametrize("parts", [2, 37, 256, 600])
@pytest.mark.parametrize("size", [1, 40])
def test_parts_are_added(parts: int, size: int) -> None:
    sums = torch.randint(-9, 9, (parts, size)).float()
    dbias = torch.empty(size)
    _bias.add_sums(dbias, sums)
    assert torch.equal(dbias, sums.sum(0))


def test_sums_are_wide() -> None:
    # float16 holds no 70000, bfloat16 no 257. The bias, and so its gradient, is float32
    for dtype, each, rows in ((torch.float16, 2000.0, 40), (torch.bfloat16, 1.0, 300)):
        x, grad = torch.full((rows, 4), 20.0, dtype=dtype), torch.full((rows, 4), each)
        _, dbias = gelu_backward(grad, x, torch.zeros(4), "tanh", (True, True))
        assert dbias is not None
        assert (dbias == rows * each).all()


@pytest.mark.usefixtures("parts")
def test_the_same_bits_again() -> None:
    x, bias, grad = torch.randn(60, 24), torch.randn(24), torch.randn(60, 24)
    for call in (
        lambda: gelu_backward(grad, x, bias, "tanh", (True, True)),
        lambda: dropout_backward(grad, seed_of(3), bias, 0.3, True, torch.float32, (True, True)),
    ):
        for one, other in zip(call(), call(), strict=True):
            assert torch.equal(one, other)


# ------------------------------------------------------------------------------------------------------------ settings

WIDTHS = (1, 2, 31, 64, 96, 768, 1000, 4096, 5120, 16384, 32768, 250_000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shares(dtype: torch.dtype) -> None:
    each = dtype.itemsize
    for size, n_rows in itertools.product(WIDTHS, (1, 3, 64, 1000, 8192, 65536, 1 << 22)):
        rows, cols, steps, tiles, parts, warps = share_columns(n_rows, size, each)
        assert rows * cols <= tile(each)[0]
        assert tiles * cols >= size > (tiles - 1) * cols
        assert parts * steps * rows >= n_rows > (parts - 1) * steps * rows, "a part without a row"
        assert parts <= 1024
        assert warps in (1, 2, 4)
        elements = n_rows * size
        if elements * each > 16 * 2**20:  # else sums stay in a cache
            share = 2 * parts * size * max(each, 4) / (3 * elements * each)
            assert parts == 1 or share < 0.03


def test_units() -> None:
    assert [unit(n) for n in (1, 2, 3, 4, 1000, 1001, 4096, 48)] == [1, 2, 1, 4, 8, 1, 16, 16]


def test_tiles() -> None:
    assert [tile(each) for each in (2, 4)] == [(2048, 4), (1024, 4)]

"""All eager kernels with a bias: sizes of models, sums, memory, autocast, devices."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from eager_bias_cases import BF16, DTYPES, F32, close, gelu_of, words_of
from eager_memory import peak
from torch import Tensor

from fusedops_eager import _gelu
from fusedops_eager._dropout import dropout_backward, dropout_forward
from fusedops_eager._gelu import gelu_backward, gelu_forward

SIZES = [
    ((1, 262_144), (262_144,)),
    ((3, 262_145), (262_145,)),
    ((1_048_577,), (1,)),
    ((700, 1111), (1111,)),
    ((700, 1111), (700, 1)),
    ((2, 3, 130, 1030), (1030,)),
    ((5, 7, 30_011), (7, 30_011)),
    ((90_000, 7), (7,)),
    ((600, 1000), (600, 1000)),
]


@pytest.mark.parametrize(
    ("shapes", "dtypes"), list(zip(SIZES, itertools.cycle([(F32, F32), (BF16, BF16), (BF16, F32)]))), ids=str
)
def test_true_sizes(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Slabs as they are in use, with sizes that divide nothing: rows within a slab, and slabs within a row."""
    shape, bias_shape = shapes
    x, bias, seed = torch.randn(shape).to(dtypes[0]), torch.randn(bias_shape).to(dtypes[1]), torch.tensor([-3])
    dtype = torch.promote_types(*dtypes)
    residual, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    u, wide = x.double() + bias.double(), grad.double()
    close(gelu_forward(x, bias, "tanh"), torch.nn.functional.gelu(u, approximate="tanh"), dtype)
    du = torch.ops.aten.gelu_backward(wide, u, approximate="tanh")
    dx, dbias = gelu_backward(grad, x, bias, "tanh", (True, True))
    assert dx is not None
    assert dbias is not None
    close(dx, du, dtypes[0], 2)
    sums = 1 + math.sqrt(x.numel() / bias.numel())  # of so many roundings, at random
    close(dbias, du.sum_to_size(bias_shape), dtypes[1], sums)

    keep = torch.from_numpy(words_of(-3, 0, x.numel()) >= round(0.1 * 2**32)).view(shape)
    dropped = torch.where(keep, u / 0.9, 0.0)
    close(dropout_forward(x, bias, None, 0.1, True, seed), dropped, dtype)
    close(dropout_forward(x, bias, residual, 0.1, True, seed), residual.double() + dropped, dtype)
    du = torch.where(keep, wide / 0.9, 0.0)
    dx, dbias = dropout_backward(grad, seed, bias, 0.1, True, dtypes[0], (True, True))
    assert dx is not None
    assert dbias is not None
    close(dx, du, dtypes[0])
    close(dbias, du.sum_to_size(bias_shape), dtypes[1], sums)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_bias_gradient_has_the_same_bits_on_every_run_and_with_any_number_of_threads(dtype: torch.dtype) -> None:
    x, grad, seed = torch.randn(700, 1111).to(dtype), torch.randn(700, 1111).to(dtype), torch.tensor([8])
    for shape in ((1111,), (700, 1), ()):
        bias = torch.randn(shape).to(dtype)
        found: list[tuple[Tensor | None, ...]] = []
        for threads in (1, 1, 2, 3):
            torch.set_num_threads(threads)
            _, one = gelu_backward(grad, x, bias, "tanh", (threads == 3, True))
            _, two = dropout_backward(grad, seed, bias, 0.1, True, dtype, (threads == 3, True))
            _, three = gelu_backward(grad, x, bias, "none", (threads == 3, True))
            _, four = dropout_backward(grad, None, bias, 0.0, True, dtype, (False, True))
            found.append((one, two, three, four))
        for sums in found:
            for one, first in zip(sums, found[0]):
                assert one is not None
                assert first is not None
                assert torch.equal(one, first)


def test_the_sum_of_a_row_that_is_a_slab_has_the_same_bits_with_any_number_of_threads() -> None:
    x, grad, bias = torch.randn(3, 400_000), torch.randn(3, 400_000), torch.zeros(3, 1)
    found: list[Tensor | None] = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(gelu_backward(grad, x, bias, "tanh", (False, True))[1])
    first = found[0]
    assert first is not None
    assert all(each is not None and torch.equal(each, first) for each in found)


def test_the_bias_gradient_is_summed_in_float32() -> None:
    """4096 ones of bfloat16 summed in bfloat16 would be 256."""
    grad, bias = torch.ones(4096, 8, dtype=BF16), torch.zeros(8, dtype=BF16)
    _, dbias = dropout_backward(grad, None, bias, 0.5, False, BF16, (True, True))
    assert dbias is not None
    assert torch.equal(dbias, torch.full((8,), 4096, dtype=BF16))
    _, dbias = gelu_backward(2 * grad, torch.zeros(4096, 8, dtype=BF16), bias, "tanh", (False, True))
    assert dbias is not None
    assert torch.equal(dbias, torch.full((8,), 4096, dtype=BF16))


def test_the_default_device_does_not_matter() -> None:
    x, bias, seed = torch.randn(6, 3000), torch.randn(3000), torch.tensor([5])
    with torch.device("meta"):
        for made in (
            gelu_forward(x, bias, "tanh"),
            *gelu_backward(x, x, bias, "tanh", (True, True)),
            dropout_forward(x, bias, x, 0.3, True, seed),
            *dropout_backward(x, seed, bias[:1], 0.3, True, F32, (True, True)),
        ):
            assert made is not None
            assert made.is_cpu


def test_other_devices_are_asked_nothing() -> None:
    """On the meta device any look at the data raises: what runs there synchronises nowhere."""
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    for dtype, form in itertools.product(DTYPES, ("tanh", "none")):
        x = torch.empty(90, 80, dtype=dtype, device="meta").T
        for bias in (None, torch.empty(90, device="meta")):
            made = [gelu_forward(x, bias, form), *gelu_backward(x, x, bias, form, (True, True))]
            made += [dropout_forward(x, bias, residual, 0.5, True, seed) for residual in (None, x)]
            made += dropout_backward(x, seed, bias, 0.5, True, dtype, (True, True))
            for y in made[:2] + made[3:6]:
                assert y is not None
                assert y.shape == x.shape
                assert y.is_contiguous()


def test_the_exact_form_elsewhere() -> None:
    """Not by F.gelu, which makes the tanh form of either on npu."""
    x = torch.linspace(-8, 8, 1001)
    y = _gelu._erf_form(x)
    torch.testing.assert_close(y.double(), gelu_of(x.double(), "none"), atol=2e-6, rtol=1.3e-6)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_peak_memory(dtype: torch.dtype) -> None:
    """Memory beside the result depends on the slab, not on the tensor."""
    shape, seed = (16384, 1024) if dtype is BF16 else (8192, 1024), torch.tensor([5])
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

"""linear_cross_entropy on cpu: the rows of a chunk, products of bfloat16 and of float32, threads, and memory."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from eager_memory import peak
from torch import Tensor

import fusedops
from fusedops_cpu.linear.products import multiply
from fusedops_cpu.losses import _linear_logits

pytestmark = pytest.mark.usefixtures("on_cpu")


def leaves(rows: int, size: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, weight and target; a row in seven is ignored."""
    numbers = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(n, size, generator=numbers).to(dtype).requires_grad_() for n in (rows, classes))
    target = torch.randint(classes, (rows,), generator=numbers)
    target[::7] = -100
    return x, weight, target


needs_bfloat16 = pytest.mark.skipif(not _linear_logits.multiplies_bfloat16(), reason="needs an AMD with AVX512-BF16")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("narrow", [pytest.param(True, marks=needs_bfloat16), False])
def test_products_of_bfloat16_and_of_float32(narrow: bool, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both, whatever this processor has; the loss is that of float32 tensors, as no logit is rounded."""
    monkeypatch.setattr(_linear_logits, "multiplies_bfloat16", lambda: narrow)
    x, weight, target = leaves(70, 25, 301, torch.bfloat16)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        given = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, weight)]
        loss = fusedops.linear_cross_entropy(*given, target, chunk=32, reduction=reduction)
        results.append([loss.detach(), *torch.autograd.grad(loss.sum(), given)])
    for tolerance, got, wanted in zip((1e-6, 1e-2, 1e-2), *results):
        torch.testing.assert_close(got.float(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def multiplied(a: Tensor, b: Tensor, narrow: bool) -> Tensor:
    """Return ``a @ b.T`` in float32."""
    out = torch.empty(a.shape[0], b.shape[0])
    multiply(a, b, out, narrow)
    return out


KINDS = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)]


@pytest.mark.parametrize("dtype", KINDS)
def test_a_row_of_a_product_has_the_same_bits_beside_any_others(dtype: torch.dtype) -> None:
    """The three parts of 3001 terms are computed side by side, in turns, or one after another, as the rows are many."""
    numbers = torch.Generator().manual_seed(2)
    narrow = dtype is torch.bfloat16
    weight, given = (torch.randn(rows, 3001, generator=numbers).to(dtype) for rows in (300, 4200))
    whole = multiplied(given, weight, narrow)
    logits = multiplied(whole.to(dtype), weight.t(), narrow)
    for rows in (1, 7, 257, 1500):
        assert torch.equal(multiplied(given[-rows:], weight, narrow), whole[-rows:]), rows
        assert torch.equal(multiplied(whole[-rows:].to(dtype), weight.t(), narrow), logits[-rows:]), rows


@needs_bfloat16
@pytest.mark.parametrize("terms", [1, 2, 31, 33, 257, 1025, 2050])
@pytest.mark.parametrize("rows", [1, 12, 13, 265])
def test_products_of_bfloat16_have_sums_in_float32(rows: int, terms: int) -> None:
    """Around the edges of a tile (12 rows, 32 columns, pairs of terms), in each order of memory; added to a result."""
    numbers = torch.Generator().manual_seed(terms)
    for columns in (1, 31, 33, 513):
        a, b = (torch.randn(n, terms, generator=numbers).bfloat16() for n in (rows, columns))
        wanted = a.double() @ b.double().t()
        size = a.double().abs() @ b.double().abs().t()
        results = []
        for of_a, of_b in product((a, a.t().contiguous().t()), (b, b.t().contiguous().t())):
            out = torch.ones(rows, columns)
            multiply(of_a, of_b, out, True, adds=True)
            results.append(out)
        assert all(torch.equal(each, results[0]) for each in results)
        assert bool(((results[0] - 1 - wanted).abs() <= 2e-6 * (size + 1)).all())


@needs_bfloat16
def test_infinities_and_nan_pass_through_products_of_bfloat16() -> None:
    a, b = torch.ones(3, 5).bfloat16(), torch.ones(40, 5).bfloat16()
    a[0, 4], a[1, 2], b[7, 4], b[39, 0] = torch.inf, torch.nan, -torch.inf, 3e38
    b[38] = 3e38
    got = multiplied(a, b, True)
    torch.testing.assert_close(got, (a.float() @ b.float().t()), equal_nan=True)
    assert got[2, 38] == torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_bits_are_the_same_on_any_number_of_threads(dtype: torch.dtype) -> None:
    """Their blocks, and the parts of 3000 classes for the gradient of x."""
    x, weight, target = leaves(300, 130, 3000, dtype)
    bias = torch.randn(3000, generator=torch.Generator().manual_seed(3)).requires_grad_()
    given = (x, weight, bias)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            loss = fusedops.linear_cross_entropy(x, weight, target, bias, softcap=5.0, reduction="none")
            results.append((loss.detach(), *torch.autograd.grad(loss.sum(), given)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for result in results for pair in zip(result, results[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_beyond_inputs_and_gradients_is_a_chunk(dtype: torch.dtype) -> None:
    x, weight, target = leaves(4096, 16, 4096, dtype)
    target = target.clamp(min=0)

    def both_ways() -> object:
        x.grad = weight.grad = None
        fusedops.linear_cross_entropy(x, weight, target).backward()
        return x.grad

    both_ways()  # what the first call alone allocates
    gradients = x.nbytes + weight.nbytes
    x.grad = weight.grad = None
    # of 16-bit tensors the gradient of weight is also summed in float32
    wide = 0 if dtype == torch.float32 else 4 * weight.nbytes
    assert peak(both_ways, gradients) * gradients - gradients - wide < x.shape[0] * weight.shape[0] * 4 / 15

"""linear_cross_entropy on cpu: the rows of a chunk, products of bfloat16 and widened ones, threads, and memory."""

from __future__ import annotations

import pytest
import torch
from eager_memory import peak
from torch import Tensor

import fusedops
from fusedops_cpu import _linear_logits

pytestmark = pytest.mark.usefixtures("on_cpu")


def leaves(rows: int, size: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, weight and target; a row in seven is ignored."""
    numbers = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(n, size, generator=numbers).to(dtype).requires_grad_() for n in (rows, classes))
    target = torch.randint(classes, (rows,), generator=numbers)
    target[::7] = -100
    return x, weight, target


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("narrow", [True, False])
def test_products_of_bfloat16_and_of_widened_blocks(
    narrow: bool, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both, whatever this processor has: float32 products of bfloat16 tensors are those of float32 tensors."""
    monkeypatch.setattr(_linear_logits, "multiplies_bfloat16", lambda: narrow)
    monkeypatch.setattr(_linear_logits, "_BLOCK", 64 * 24)  # several blocks of weight
    x, weight, target = leaves(70, 24, 300, torch.bfloat16)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        given = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, weight)]
        loss = fusedops.linear_cross_entropy(*given, target, chunk=32, reduction=reduction)
        results.append([loss.detach(), *torch.autograd.grad(loss.sum(), given)])
    scale = [1e-2 if narrow else 1e-6, 2e-2, 2e-2]
    for tolerance, got, wanted in zip(scale, *results):
        torch.testing.assert_close(got.float(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def test_independent_rows_have_products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, target = leaves(70, 24, 300, torch.bfloat16)
    results = []
    for narrow, rows in ((False, "any"), (True, "independent")):
        monkeypatch.setattr(_linear_logits, "multiplies_bfloat16", lambda narrow=narrow: narrow)
        with fusedops.use(rows=rows):
            loss = fusedops.linear_cross_entropy(x, weight, target, reduction="none")
        results.append((loss.detach(), *torch.autograd.grad(loss.sum(), (x, weight))))
    assert all(map(torch.equal, *results))


def test_a_row_of_a_product_has_the_same_bits_beside_any_others() -> None:
    """The three parts of 3000 terms are computed side by side, in turns, or one after another, as the rows are many."""
    numbers = torch.Generator().manual_seed(2)
    product = _linear_logits._Float32Product(torch.randn(3000, 300, generator=numbers))
    given = torch.randn(4200, 3000, generator=numbers)
    whole = product.of_rows(given)
    logits = torch.empty(4200, 3000)
    product.logits(whole, logits)
    for rows in (1, 7, 257, 1500):
        assert torch.equal(product.of_rows(given[-rows:]), whole[-rows:]), rows
        some = torch.empty(rows, 3000)
        product.logits(whole[-rows:], some)
        assert torch.equal(some, logits[-rows:]), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_bits_are_the_same_on_any_number_of_threads(dtype: torch.dtype) -> None:
    """Where the products are the library's: their blocks, and the parts of 3000 classes for the gradient of x."""
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
    # of 16-bit tensors the gradient of weight is also summed in float32, and a product is rounded to 16 bits
    wide = 0 if dtype == torch.float32 else 4 * weight.nbytes
    assert peak(both_ways, gradients) * gradients - gradients - wide < x.shape[0] * weight.shape[0] * 4 / 15

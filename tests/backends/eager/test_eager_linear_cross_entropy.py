"""The eager kernel of linear_cross_entropy: chunks, blocks of 16-bit weights, and memory."""

from __future__ import annotations

import pytest
import torch
from eager_memory import peak

import fusedops
from fusedops.ops.losses.formulas import rows_of_chunk
from fusedops_eager import _chunks as eager

pytestmark = pytest.mark.usefixtures("no_compiled_backend")


def test_a_chunk_has_logits_of_about_the_size_of_x() -> None:
    least = eager.LEAST_ROWS
    assert rows_of_chunk(65536, 4096, 65536, least) == 4096
    assert rows_of_chunk(3840, 512, 32000, least) == least
    assert rows_of_chunk(300, 512, 32000, least) == 150  # of two chunks, not of 192 rows and 108
    assert rows_of_chunk(100, 512, 32000, least) == 100
    assert rows_of_chunk(100, 512, 32000, least, chunk=7) == 7
    assert rows_of_chunk(0, 512, 32000, least) == 1


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_blocks_of_a_16_bit_weight_give_the_same(reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(40, 32).bfloat16(), torch.randn(300, 32).bfloat16()
    target = torch.randint(300, (40,))
    results = []
    for elements in (2**20, 64 * 32):
        monkeypatch.setattr(eager, "_WIDENED", elements)
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = fusedops.linear_cross_entropy(*leaves, target, reduction=reduction, backend="eager")
        results.append([loss.detach(), *torch.autograd.grad(loss.sum(), leaves)])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_of_all_rows_never_exist(dtype: torch.dtype) -> None:
    """Beyond inputs and gradients: a chunk, and what a backward needs that gives the saved gradients back."""
    x, weight = torch.randn(2048, 64).to(dtype).requires_grad_(), torch.randn(8192, 64).to(dtype).requires_grad_()
    target = torch.randint(8192, (2048,))
    logits = 2048 * 8192 * 4

    def both_ways() -> object:
        fusedops.linear_cross_entropy(x, weight, target, backend="eager").backward()
        return x.grad

    gradients = x.nbytes + weight.nbytes
    # of 16-bit tensors the gradient of weight is also summed in float32
    wide = 0 if dtype == torch.float32 else 2 * weight.nbytes
    assert peak(both_ways, gradients) * gradients - gradients - wide < logits / 6

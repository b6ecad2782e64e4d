"""The eager kernels of linear_log_probs: chunks, and memory."""

from __future__ import annotations

import pytest
import torch
from eager_memory import peak

import fusedops
from fusedops_eager import _chunks

pytestmark = pytest.mark.usefixtures("no_compiled_backend")


@pytest.mark.parametrize("rows", [1, 7])
def test_chunks_of_any_size_give_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(40, 32), torch.randn(300, 32)
    target = torch.randint(300, (40,)).masked_fill(torch.arange(40) % 9 == 1, -100)
    results = []
    for least in (40, rows):
        monkeypatch.setattr(_chunks, "LEAST_ROWS", least)
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        outputs = fusedops.linear_log_probs(*leaves, target, return_entropy=True, backend="eager")
        results.append([*outputs, *torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), leaves)])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("entropy", [False, True])
def test_the_logits_of_all_rows_never_exist(entropy: bool) -> None:
    x, weight = torch.randn(2048, 64).requires_grad_(), torch.randn(8192, 64).requires_grad_()
    target = torch.randint(8192, (2048,))
    logits = 2048 * 8192 * 4

    def both_ways() -> object:
        results = fusedops.linear_log_probs(x, weight, target, return_entropy=entropy, backend="eager")
        (results[0].sum() + results[1].sum() if entropy else results.sum()).backward()
        return x.grad

    gradients = x.nbytes + weight.nbytes
    assert peak(both_ways, gradients) * gradients - gradients < logits / 5

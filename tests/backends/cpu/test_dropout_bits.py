"""The keep mask of the library, bit for bit."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops.testing import keep_mask

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32 + 5, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_and_backward_keep_the_same_elements(seed: int, dtype: torch.dtype) -> None:
    for count in (1, 3, 4, 191, 192, 193, 4097, 32768, 32769, 100_003):
        x = torch.ones(count, dtype=dtype, requires_grad=True)
        y = fusedops.bias_dropout(x, None, 0.25, seed=seed)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        keep = keep_mask(torch.tensor([seed]), 0.25, (count,))
        assert torch.equal(y != 0, keep)
        assert torch.equal(dx != 0, keep)


@pytest.mark.parametrize("columns", [1, 3, 5, 64, 1023, 4097, 9001])
def test_rows_that_begin_within_a_counter(columns: int) -> None:
    """Each part of the sum for the bias begins at an index that may not be a multiple of 4."""
    rows = max(3, 70_000 // columns)
    x = torch.ones(rows, columns)
    bias = torch.zeros(columns, requires_grad=True)
    y = fusedops.bias_dropout(x, bias, 0.5, seed=9)
    (dbias,) = torch.autograd.grad(y, bias, torch.ones_like(y))
    assert torch.equal(dbias, keep_mask(torch.tensor([9]), 0.5, x.shape).sum(0) * 2.0)

"""The dropout kernels of the triton backend, run by Triton's interpreter on a CPU, against float64."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from triton_cases import seed_of

from fusedops import philox as _philox
from fusedops.ops.bias import bias_dropout_add
from fusedops_triton.bias._bias_dropout import dropout_backward, dropout_forward


def test_x_is_taken_in_the_dtype_of_the_residual() -> None:
    # float16 holds no 70000: x becomes infinity there, and it would not if it were only narrowed at the end
    x, residual = torch.tensor([70000.0, 1.0]), torch.tensor([-60000.0, 1.0], dtype=torch.float16)
    with pytest.warns(RuntimeWarning, match="overflow"):
        y = dropout_forward(x, None, residual, 0.0, True, None)
    assert torch.equal(y, bias_dropout_add.OP.reference(x, None, residual, 0.0, True, None))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nothing_leaks_from_dropped_elements() -> None:
    keep = _philox.keep_mask(seed_of(7), 0.5, (40,))
    for poison in (math.nan, math.inf):
        x = torch.ones(40).masked_fill(~keep, poison)
        assert torch.equal(dropout_forward(x, None, torch.ones(40), 0.5, True, seed_of(7)), 1 + 2 * keep.float())
        everything = torch.full((40,), poison)
        assert torch.equal(dropout_forward(everything, None, torch.ones(40), 1.0, True, seed_of(7)), torch.ones(40))
        dx, _ = dropout_backward(x, seed_of(7), None, 0.5, True, torch.float32, (True, False))
        assert torch.equal(dx, 2 * keep.float())

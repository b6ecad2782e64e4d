"""The eager kernels of bias_gelu: extremes."""

from __future__ import annotations

import math

import pytest
import torch

from fusedops.testing import OPS
from fusedops_eager.bias._gelu import gelu_backward, gelu_forward


@pytest.mark.parametrize("form", ["tanh", "none"])
def test_gelu_of_extremes(form: str) -> None:
    """Large numbers are as torch has them; 1e14 cubed is beyond float32, and its gradient is still 1."""
    x = torch.tensor([0.0, -0.0, 30, -30, 1e14, -1e14, 1e18, -1e18, math.inf, -math.inf, math.nan, 1e-40])
    y = gelu_forward(x, None, form)
    # not F.gelu, which torch computes wrongly for inf with AVX-512
    want = OPS["bias_gelu"].reference(x.double(), None, form).float()
    torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-7, equal_nan=True)
    dx, _ = gelu_backward(torch.ones_like(x), x, None, form, (True, False))
    assert dx is not None
    want = torch.tensor([0.5, 0.5, 1, 0, 1, 0, 1, 0])
    torch.testing.assert_close(dx[:8], want, rtol=1e-6, atol=1e-7)
    rows, bias = x[:8].expand(3, 8), torch.zeros(8)
    for needs in ((True, True), (False, True)):
        dx, dbias = gelu_backward(torch.ones(3, 8), rows, bias, form, needs)
        assert dbias is not None
        torch.testing.assert_close(dbias, 3 * want, rtol=1e-6, atol=1e-7)
        if dx is not None:
            torch.testing.assert_close(dx, want.expand(3, 8), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["tanh", "none"])
def test_gelu_of_the_largest_number_is_that_number(form: str, dtype: torch.dtype, device: str) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, 1.0, math.inf] * 9, dtype=dtype)
    y = gelu_forward(x.to(device), None, form).cpu()
    assert torch.equal(y.view(9, 4)[:, [0, 3]], x.view(9, 4)[:, [0, 3]])
    assert not y.view(9, 4)[:, 1].any()

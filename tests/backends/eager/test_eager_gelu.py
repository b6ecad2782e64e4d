"""The eager kernels of bias_gelu: extremes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusedops.testing import OPS
from fusedops_eager.bias import _gelu
from fusedops_eager.bias._gelu import gelu_backward, gelu_forward


@pytest.mark.parametrize("form", ["tanh", "none"])
def test_gelu_of_extremes(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large numbers are as torch has them; 1e14 cubed is beyond float32, and its gradient is still 1."""
    monkeypatch.setattr(_gelu, "_MIN_SLAB_ELEMENTS", 0)
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
@pytest.mark.parametrize("slabs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["tanh", "none"])
def test_gelu_of_the_largest_number_is_that_number(
    form: str, dtype: torch.dtype, slabs: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if slabs:
        monkeypatch.setattr(_gelu, "_MIN_SLAB_ELEMENTS", 0)
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, -largest, 1.0, math.inf] * 9, dtype=dtype)
    y = gelu_forward(x.to(device), None, form).cpu()
    assert torch.equal(y.view(9, 4)[:, [0, 3]], x.view(9, 4)[:, [0, 3]])
    assert not y.view(9, 4)[:, 1].any()


def test_gelu_of_large_numbers_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 1e12 the cube is finite, and nothing is done again."""
    monkeypatch.setattr(_gelu, "_MIN_SLAB_ELEMENTS", 0)
    monkeypatch.setattr(Tensor, "clamp_", lambda *_: pytest.fail("done again"))
    x = torch.tensor([0.0, -0.0, 1e-40, 5, -5, 9, -9, 12, -12, 30, -30, 1e8, -1e8, 1e12, -1e12]).expand(3, 15)
    grad = torch.tensor([1.0, -1e30, 1e-30])[:, None].expand_as(x)
    dx, dbias = gelu_backward(grad, x, torch.zeros(15), "tanh", (True, True))
    want = torch.ops.aten.gelu_backward(grad.double(), x.double(), approximate="tanh")
    assert dx is not None
    assert dbias is not None
    torch.testing.assert_close(dx.double() / grad, want / grad, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(dbias.double() / -1e30, want.sum(0) / -1e30, rtol=2e-5, atol=1e-6)

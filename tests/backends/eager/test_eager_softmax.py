"""The eager kernels of scaled_masked_softmax: rounding."""

from __future__ import annotations

import pytest
import torch

from fusedops_eager.softmax._softmax import softmax_backward, softmax_forward

F16, BF16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize("scale", [0.125, 0.3])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_sums_of_16_bits_are_wide(dtype: torch.dtype, scale: float) -> None:
    """With all gradients near 30, sum(g * y) rounded to the dtype would be wrong by more than what is left of g."""
    y = torch.softmax(torch.randn(20, 1000), -1).to(dtype)
    grad = (30 + 0.1 * torch.randn(20, 1000)).to(dtype)
    g, p = grad.double(), y.double()
    wanted = scale * p * (g - (g * p).sum(-1, keepdim=True))
    error = (softmax_backward(grad, y, scale, False).double() - wanted).abs().max()
    assert error < torch.finfo(dtype).eps * wanted.abs().max()
    scores = torch.zeros(4, 5000, dtype=dtype)  # counted in 16 bits, the ones would stop at 256 or 2048
    assert torch.equal(softmax_forward(scores, None, scale, False), torch.full_like(scores, 1 / 5000))


def test_scale_is_not_rounded_to_the_dtype() -> None:
    for dtype in (F16, BF16):
        eps = torch.finfo(dtype).eps
        scale = 0.125 * (1 + 0.49 * eps)  # rounded to the dtype it would be 0.125
        x = (100 * torch.randn(4, 8, 64)).to(dtype)
        exact = torch.softmax(x.double() * scale, -1)
        large = exact > 1e-2
        bound = 0.52 * eps * exact[large]  # one rounding of y
        assert ((torch.softmax(x.double() * 0.125, -1) - exact)[large].abs() > bound).any()
        for mask in (None, torch.zeros(8, 64, dtype=torch.bool)):
            y = softmax_forward(x, mask, scale, False).double()
            assert ((y - exact)[large].abs() <= bound).all()

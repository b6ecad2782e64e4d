"""The eager kernels of scaled_masked_softmax: rounding, slabs at the sizes of models, threads, devices, memory."""

from __future__ import annotations

import pytest
import torch
from eager_memory import peak
from torch import Tensor

from fusedops_eager import _slabs
from fusedops_eager.softmax import _softmax as kernels
from fusedops_eager.softmax._softmax import softmax_backward, softmax_forward

INF = float("inf")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [F16, BF16, F32, F64]


@pytest.fixture(params=["plain", "slabs", "tiny slabs"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of the CPU kernel at sizes a test can afford: slabs of 64 elements cross every boundary."""
    if request.param != "plain":
        monkeypatch.setattr(kernels, "_MAX_PLAIN_ELEMENTS", 0)
    if request.param == "tiny slabs":
        monkeypatch.setattr(_slabs, "SLAB", 128)
    return request.param


def make_mask(kind: str, b: int, h: int, sq: int, sk: int) -> Tensor:
    sizes = {"b": b, "h": h, "q": sq, "k": sk, "1": 1}
    return torch.rand([sizes[c] for c in kind]) < 0.4


@pytest.mark.usefixtures("path")
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


@pytest.mark.usefixtures("path")
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_into_its_own_input_gives_the_same_bits(dtype: torch.dtype) -> None:
    """The slabs depend on this; a torch for which it fails needs another kernel."""
    for sk in (1, 7, 8, 33, 1000, 4097):
        x, grad = torch.randn(64, sk).to(dtype), torch.randn(64, sk).to(dtype)
        y = torch._softmax(x, -1, False)
        assert torch.equal(torch._softmax(x, -1, False, out=x), y)
        dx = torch._softmax_backward_data(grad, y, -1, dtype)
        assert torch.equal(torch._softmax_backward_data(grad, y, -1, dtype, grad_input=grad), dx)


@pytest.mark.parametrize(("dtype", "scale"), [(F32, 0.3), (BF16, 0.125), (BF16, 0.3)])
def test_peak_memory(dtype: torch.dtype, scale: float) -> None:
    """At most 15 % above the result, whatever the mask; the naive form takes 100 %."""
    b, h, sq, sk = 2, 16, 512, 512
    x = torch.randn(b, h, sq, sk).to(dtype)
    if dtype is F32:
        padding = torch.rand(b, 1, 1, sk) < 0.5
        assert peak(lambda: torch.softmax((x * scale).masked_fill(padding, -INF), -1), x.nbytes) > 1.9
    for kind in ("b1qk", "bhqk", "b11k"):
        mask = make_mask(kind, b, h, sq, sk)
        assert peak(lambda mask=mask: softmax_forward(x, mask, scale, False), x.nbytes) < 1.15, kind
    mask = (torch.rand(b, h, sq, sk) < 0.5).to(torch.uint8)
    mask[..., 300:, :] = 1
    assert peak(lambda: softmax_forward(x, mask, scale, True), x.nbytes) < 1.15
    y = softmax_forward(x, mask, scale, False)
    assert peak(lambda: softmax_backward(y[:1, :1].expand_as(y), y, scale, False), x.nbytes) < 1.15

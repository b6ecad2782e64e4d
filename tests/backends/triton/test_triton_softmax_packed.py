"""Softmax of rows on chip as pairs of two-byte elements, by Triton's interpreter, against float64 in torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from triton_traffic import Traffic, total

from fusedops.testing import OPS
from fusedops_triton.launch import settings
from fusedops_triton.launch.settings import PACKED_ON_CHIP, packed_plan
from fusedops_triton.softmax import _softmax
from fusedops_triton.softmax._softmax import softmax_backward, softmax_forward

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of NaN and infinity
OP = OPS["scaled_masked_softmax"]
DTYPES = (torch.float16, torch.bfloat16)
WIDTHS = (16392, 20000, 24576, 32760, 32768)  # 9 to 16 parts, of which the last is whole, or not
RTOL = {torch.float16: 1e-3, torch.bfloat16: 8e-3}  # the interpreter does not round to bfloat16, it truncates
ATOL = {torch.float16: 6e-8, torch.bfloat16: 0.0}


def forward_of(x: Tensor, scale: float) -> Tensor:
    return OP.reference(x.double(), None, scale, False)


def assert_close(got: Tensor, expected: Tensor) -> None:
    tolerance = {"rtol": RTOL[got.dtype], "atol": ATOL[got.dtype]}
    torch.testing.assert_close(got.double(), expected, equal_nan=True, **tolerance)


def kernels_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of each kernel that is launched."""
    names: list[str] = []
    launch = _softmax.Launch.__call__

    def noted(self: _softmax.Launch, *args: object) -> object:
        names.append(self.kernel.fn.__name__)
        return launch(self, *args)

    monkeypatch.setattr(_softmax.Launch, "__call__", noted)
    return names


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_forward(dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = kernels_of(monkeypatch)
    x = (torch.randn(1, 2, 1, width) * 4).to(dtype)
    assert_close(softmax_forward(x, None, 0.3, False), forward_of(x, 0.3))
    assert_close(softmax_forward(x, None, -0.3, False), forward_of(x, -0.3))
    assert names == ["forward_packed", "forward_packed"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8200, 12288, 16384])
def test_backward(dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = kernels_of(monkeypatch)
    grad = torch.randn(3, width).to(dtype)
    y = torch.softmax(torch.randn(3, width) * 4, -1).to(dtype)
    got, expected = softmax_backward(grad, y, 0.3, False), OP.backward(grad.double(), y.double(), 0.3, False)
    # the difference of the gradient and the sum may cancel
    error = (got.double() - expected).abs()
    limit = RTOL[dtype] * (expected.abs() + 1e-6 * y.double().abs()) + ATOL[torch.float16]
    assert (error <= limit).all()
    assert names == ["backward_packed"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_infinities_and_nan_and_a_scale_of_zero(dtype: torch.dtype) -> None:
    x = torch.randn(6, 20000).to(dtype)
    x[0, 7] = math.inf
    x[1, 19999] = -math.inf
    x[2, 4096] = math.nan
    x[3, :] = -math.inf
    x[4, :16000] = -math.inf
    got = softmax_forward(x, None, 0.5, False)
    assert_close(got, forward_of(x, 0.5))
    assert got[1, 19999] == 0
    assert_close(softmax_forward(x[4:], None, 0.0, False), forward_of(x[4:], 0.0))


def test_a_gradient_with_nan_stays_in_its_row() -> None:
    grad, y = torch.randn(2, 10000).bfloat16(), torch.rand(2, 10000).bfloat16()
    grad[0, 9999] = math.nan
    dx = softmax_backward(grad, y, 0.5, False)
    assert dx[0].isnan().all()
    assert not dx[1].isnan().any()


def test_each_row_is_read_once(traffic: Traffic) -> None:
    x = torch.randn(2, 65536).bfloat16()
    y = softmax_forward(x, None, 0.3, False)
    pairs = x.view(torch.int32)
    assert traffic.asked(pairs) == traffic.distinct(pairs) == x.nbytes
    assert total(traffic) == 2 * x.nbytes
    grad, y = torch.randn(2, 32768).bfloat16(), torch.rand(2, 32768).bfloat16()
    softmax_backward(grad, y, 0.3, False)
    assert total(traffic) == 2 * x.nbytes + 3 * y.nbytes


@pytest.mark.parametrize("which", ["misaligned", "strided", "odd width", "masked", "causal", "float32", "wider"])
def test_other_tensors_take_the_other_kernels(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = kernels_of(monkeypatch)
    width = {"odd width": 20001, "wider": PACKED_ON_CHIP[1] + 8}.get(which, 20000)
    x = torch.randn(2, width + 16).to(torch.float32 if which == "float32" else torch.bfloat16)
    x = x[:, :width] if which == "strided" else x[:, :width].contiguous()
    if which == "misaligned":
        x = torch.randn(2 * width + 1).bfloat16()[1:].view(2, width)
        assert x.is_contiguous()
    mask = torch.rand(2, width) < 0.3 if which == "masked" else None
    y = softmax_forward(x, mask, 0.3, which == "causal")
    kept = torch.ones(2, width, dtype=torch.bool).tril() if which == "causal" else mask is None or ~mask
    expected = torch.softmax((x.double() * 0.3).masked_fill(~torch.as_tensor(kept), -math.inf), -1)
    torch.testing.assert_close(y.double(), expected, rtol=8e-3, atol=0.0)
    assert names == ["forward_long" if which == "wider" else "_forward_on_chip"]


def test_the_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(inputs: int, *widths: int) -> list[int | None]:
        plans = [packed_plan(width, 2, inputs) for width in widths]
        return [None if plan is None else plan.parts for plan in plans]

    assert parts(1, 16384, 16392, 32768, 40000, 65536, 65544, 20001) == [None, 9, 16, 10, 16, None, None]
    assert parts(2, 8192, 8200, 16384, 20000, 32768, 32776) == [None, 5, 8, 5, 8, None]
    assert packed_plan(40000, 4, 1) is packed_plan(20000, 4, 2) is None
    monkeypatch.setattr(settings, "chip", settings.CHIPS["sm_100"])
    assert parts(1, 8192, 8200, 16384) == [None, 9, 16]
    assert parts(2, 4096, 4104, 8192) == [None, 5, 8]

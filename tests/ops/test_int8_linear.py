"""int8_linear and quantize_rows: the same bits on every backend, for any number of rows and threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.quantization import quantize_rows

TINY = 2.0**-149


def integers(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def test_rows_are_rounded_half_to_even_with_a_scale_of_their_own() -> None:
    rows = [[127.0, 0.5, 1.5, -2.5, -126.5], [0.0, -0.0, 0.0, 0.0, 0.0], [254.0, -254.0, 3.0, 5.0, 0.0]]
    rows += [[50 * TINY, -TINY, 0.0, 0.0, 0.0], [180 * TINY, -90 * TINY, TINY, 0.0, 0.0]]
    rows += [[1.0, torch.nan, 2.0, 0.0, 0.0], [1.0, -torch.inf, 2.0, 0.0, 0.0]]
    q, scale = quantize_rows(torch.tensor(rows))
    assert q.tolist()[:3] == [[127, 0, 2, -2, -126], [0] * 5, [127, -127, 2, 2, 0]]
    assert q.tolist()[3:] == [[0] * 5, [127, -90, 1, 0, 0], [0] * 5, [0] * 5]
    assert scale[:5].tolist() == [1.0, 0.0, 2.0, 0.0, TINY]
    assert scale[5:].isnan().all()
    smooth = torch.tensor([0.5, 2.0])
    assert torch.equal(quantize_rows(torch.tensor([3.0, 8.0]), smooth=smooth)[0], torch.tensor([127, 85]).to(q))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 770), (7, 130), (40, 4100)])
def test_the_result_is_that_of_exact_sums(rows: int, columns: int, backend: str) -> None:
    q, weight = integers(rows, columns), integers(69, columns)
    q[0], weight[0] = 127, -127
    x_scale, weight_scale = torch.rand(rows), torch.rand(69)
    sums = (q.double() @ weight.double().t()).float()
    for bias in (None, torch.randn(69).bfloat16()):
        want = sums * x_scale[:, None] * weight_scale + (0.0 if bias is None else bias.float())
        for dtype in (None, torch.bfloat16):
            got = fusedops.int8_linear(q, x_scale, weight, weight_scale, bias, dtype=dtype)
            assert torch.equal(got, want.to(dtype or torch.float32))


def test_a_zero_has_the_sign_of_its_factors(backend: str) -> None:
    q, weight, ones = integers(2, 8), integers(3, 8), torch.ones(3)
    zeros = fusedops.int8_linear(q.abs(), -torch.zeros(2), weight.abs(), ones)
    assert zeros.signbit().all()
    q[0] = 0
    added = fusedops.int8_linear(q, -torch.ones(2), weight, ones, -torch.zeros(3, dtype=torch.bfloat16))
    assert added[0].signbit().all()


def test_bytes_may_lie_anywhere(backend: str) -> None:
    packed = fusedops.quantization.quantize(torch.randn(5, 16), "INT8")
    moved = torch.zeros(5 * 20 + 1, dtype=torch.uint8)[1:].view(5, 20).copy_(packed)
    for each in (moved, packed.t().contiguous().t()):
        assert torch.equal(
            fusedops.quantization.dequantize(each, "INT8"), fusedops.quantization.dequantize(packed, "INT8")
        )
        layer = fusedops.nn.QuantizedLinear(16, 5, bias=False, format="INT8")
        layer.load_state_dict({"packed_INT8": each}, assign=True)
        x = torch.randn(3, 16)
        assert torch.equal(layer(x), fusedops.int8_linear(x, None, *fusedops.quantization.int8_parts(packed)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_rows_and_threads_give_the_bits_of_eager(dtype: torch.dtype) -> None:
    """Rows that are subnormal, 0 and not finite among them, and scales that are given, which saturate."""
    x, packed = torch.randn(300, 260).to(dtype), fusedops.quantization.quantize(torch.randn(131, 260), "INT8")
    x[3] *= 0
    x[4], x[5, 7], x[6, 8] = 1e-42, torch.nan, torch.inf
    weight, weight_scale = fusedops.quantization.int8_parts(packed)  # neither is contiguous
    smooth, bias = torch.rand(260) + 0.5, torch.randn(131)
    threads = torch.get_num_threads()
    try:
        for x_scale in (None, torch.rand(300) * 0.01):

            def call(rows: slice, backend: str, x_scale: Tensor | None = x_scale) -> Tensor:
                given = None if x_scale is None else x_scale[rows]
                options = {"smooth": smooth, "backend": backend}
                return fusedops.int8_linear(x[rows], given, weight, weight_scale, bias, **options)  # pyright: ignore

            want = call(slice(None), "eager")
            assert want[5:7].isnan().all()
            assert want.isnan().any(1).sum() == 2
            for count in (1, 3):
                torch.set_num_threads(count)
                for rows in (slice(0, 300), slice(3, 7), slice(0, 1), slice(4, 17), slice(100, 140)):
                    for backend in ("cpu", "eager"):
                        torch.testing.assert_close(call(rows, backend), want[rows], rtol=0, atol=0, equal_nan=True)
    finally:
        torch.set_num_threads(threads)


def test_the_gradient_is_that_of_the_weight_without_a_rounding_of_x(backend: str) -> None:
    weight, weight_scale = quantize_rows(torch.randn(37, 66))
    smooth = torch.rand(66) + 0.5
    x, bias = torch.randn(2, 3, 66).requires_grad_(), torch.randn(37).requires_grad_()
    grad = torch.randn(2, 3, 37)
    got = torch.autograd.grad(fusedops.int8_linear(x, None, weight, weight_scale, bias, smooth=smooth), (x, bias), grad)
    dx = grad.double() @ (weight.double() * weight_scale.double()[:, None]) / smooth.double()
    torch.testing.assert_close(got[0], dx.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], grad.sum((0, 1)))

"""quantized_linear on eager and cpu: values, rows that do not change each other, memory."""

from __future__ import annotations

import pytest
import torch
from packed_weights import assert_rows_stand_alone, odd_scales, packed_rows, packed_weight

from fusedops.ops import quantized_linear
from fusedops.quantization import FORMATS, dequantize

every_format = pytest.mark.parametrize("format", FORMATS)


@every_format
def test_each_weight_has_its_value(format: str, backend: str) -> None:
    """A row of x with one 1 gives a column of the weight, exactly: also where its scale is subnormal, inf or NaN.

    The numbers of rows are those of other kernels.
    """
    columns = FORMATS[format].weights
    packed = odd_scales(packed_rows(format, 36, columns), format)
    weight = dequantize(packed, format)
    finite = weight.isfinite().all(1)
    assert finite.sum() >= 24
    for rows in (slice(columns), slice(5, 6), slice(5, 13)):
        got = quantized_linear(torch.eye(columns)[rows], packed, format=format).t()
        assert torch.equal(got[finite], weight[:, rows][finite])
        assert finite.all() or not got[~finite].isfinite().all()


@every_format
def test_nan_in_a_row_of_x_reaches_no_other_row(format: str, backend: str) -> None:
    x, packed = torch.randn(5, 512), packed_rows(format, 9, 512)
    clean = quantized_linear(x, packed, format=format)
    x[2, 300] = torch.nan
    got = quantized_linear(x, packed, format=format)
    assert got[2].isnan().all()
    assert torch.equal(got[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_format
def test_the_bits_of_a_row_depend_on_it_alone(format: str, dtype: torch.dtype) -> None:
    assert_rows_stand_alone(packed_weight(format, 70, 2304), dtype)


@pytest.mark.parametrize("format", ["Q8_0", "Q4_K"])
def test_few_rows_have_the_same_bits_on_several_threads(format: str) -> None:
    """A product of 2**20 numbers or more has two workers; those above have one."""
    packed, x = packed_rows(format, 1030, 2304), torch.randn(9, 2304)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = quantized_linear(x, packed, format=format, backend="cpu")
        torch.set_num_threads(3)
        for rows in (slice(1), slice(3, 5), slice(9)):
            assert torch.equal(quantized_linear(x[rows], packed, format=format, backend="cpu"), want[rows])
    finally:
        torch.set_num_threads(threads)


def test_the_gradient_is_that_of_the_unpacked_weight(backend: str) -> None:
    packed = packed_rows("Q4_K", 300, 512)
    torch.manual_seed(0)
    x, bias = torch.randn(2, 3, 512).requires_grad_(), torch.randn(300).requires_grad_()
    grad = torch.randn(2, 3, 300)
    got = torch.autograd.grad(quantized_linear(x, packed, bias, format="Q4_K"), (x, bias), grad)
    y = torch.nn.functional.linear(x.double(), dequantize(packed, "Q4_K", torch.float64), bias.double())
    for mine, theirs in zip(got, torch.autograd.grad(y, (x, bias), grad.double())):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=3e-4)  # of sums of about 100


def test_the_whole_weight_is_never_unpacked(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0

    def watched(packed: torch.Tensor, *args: object) -> torch.Tensor:
        nonlocal most
        result = dequantize(packed, *args)  # pyright: ignore[reportArgumentType]
        most = max(most, result.numel())
        return result

    monkeypatch.setattr("fusedops.quantization._packed.dequantize", watched)
    packed = packed_rows("Q8_0", 4096, 1024)
    y = quantized_linear(torch.randn(1, 1024).requires_grad_(), packed, format="Q8_0")
    y.sum().backward()
    assert most == (2**20 if backend == "eager" else 0)

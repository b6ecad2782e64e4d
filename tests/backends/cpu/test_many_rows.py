"""Rows of a linear layer whose terms are added in another order than those of other calls, unless rows matter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.quantization import FORMATS, Packed, dequantize, pack, quantize, unpack
from fusedops_cpu.launch.calls import results_of
from fusedops_cpu.launch.library import library
from fusedops_cpu.linear.linear import linear, linear_by_lanes

NUMBERS = torch.Generator().manual_seed(3)
needs_pairs = pytest.mark.skipif(not library().multiplies_bfloat16, reason="needs an AMD with AVX512-BF16")


def normal(*sizes: int) -> Tensor:
    """Return normal numbers."""
    return torch.randn(*sizes, generator=NUMBERS)


def assert_near(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """The error is a rounding of the result, and some of its sums in float32."""
    x, weight, bias = x.double(), weight.double(), bias.double()
    wanted = x @ weight.t() + bias
    size = x.abs() @ weight.abs().t() + bias.abs()
    bound = torch.finfo(got.dtype).eps / 2 * wanted.abs() + 1e-6 * size
    assert bool(((got.double() - wanted).abs() <= bound).all())


@pytest.mark.parametrize("terms", [5, 768, 1700])
@pytest.mark.parametrize("rows", [96, 107, 300])
def test_float32(rows: int, terms: int) -> None:
    """Around a tile of 12 rows and 32 columns; of one part of the terms and of three."""
    for columns in (31, 64, 161):
        x, weight, bias = normal(rows, terms), normal(columns, terms), normal(columns)
        y = results_of(linear.function(x, weight, bias, None))
        assert_near(y, x, weight, bias)
        assert torch.equal(results_of(linear.function(x, weight, bias, "relu")), y.relu())
        assert_near(results_of(linear.function(x, weight, None, None)), x, weight, torch.zeros(columns))


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights(format: str, dtype: torch.dtype) -> None:
    """Of integers by pairs of bfloat16; of two parts, and of columns beside whole tiles."""
    packed = quantize(normal(70, 1280), format)
    weight, bias = dequantize(packed, format), normal(70)
    for rows in (48, 67, 300):
        x = normal(rows, 1280).to(dtype)
        with fusedops.use("cpu", fallback="raise"):
            assert_near(fusedops.quantized_linear(x, packed, bias, format=format), x, weight, bias)


@needs_pairs
@pytest.mark.parametrize("number", [3e38, torch.inf, torch.nan])
def test_numbers_whose_sum_of_a_run_may_not_be_finite(number: float) -> None:
    """They are computed as few rows are: the zeros of Q4_1 have values, and a scale makes large sums small again."""
    packed = quantize(normal(40, 256), "Q4_1")
    x = normal(60, 256).bfloat16()
    x[7, 9] = number
    got = fusedops.quantized_linear(x, packed, format="Q4_1")
    with fusedops.use(rows="independent"):
        wanted = fusedops.quantized_linear(x, packed, format="Q4_1")
    assert torch.equal(got.nan_to_num(9.0), wanted.nan_to_num(9.0))
    assert torch.equal(got.isnan(), wanted.isnan())


def test_where_rows_matter_a_row_has_the_bits_that_it_has_alone() -> None:
    x, weight = normal(100, 1280), normal(40, 1280)
    alone = results_of(linear_by_lanes(x[77:78], weight, None, None))
    assert torch.equal(results_of(linear_by_lanes(x, weight, None, None))[77:78], alone)
    assert linear.for_independent_rows().function is linear.for_rows


@pytest.mark.parametrize("format", ["FP8_ROW", "FP8_BLOCK", "FP8_TENSOR"])
@pytest.mark.parametrize("columns", [32, 1440, 8352])
def test_one_row_of_fp8(format: str, columns: int) -> None:
    """Its scales multiply sums. Of more groups than are read at once, a block that is cut, outputs beside four."""
    packed, bias = pack(normal(135, columns), format), normal(135)
    weight = unpack(packed)
    for size in (1.0, 1e30, 1e-15):  # the last two are computed as other rows are
        for dtype in (torch.float32, torch.bfloat16):
            x = (normal(1, columns) * size).to(dtype)
            with fusedops.use("cpu", fallback="raise"):
                assert_near(fusedops.quantized_linear(x, packed, bias * size), x, weight, bias * size)
    x, rows = normal(1, columns), normal(4, columns)
    with fusedops.use("cpu", fallback="raise", rows="independent"):
        alone = fusedops.quantized_linear(x, packed)
        assert torch.equal(fusedops.quantized_linear(torch.cat([rows, x]), packed)[4:], alone)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("column", [0, 63, 1439])
def test_one_row_of_fp8_and_a_code_of_nan(code: int, column: int) -> None:
    packed = pack(normal(9, 1440), "FP8_ROW")
    codes = packed.codes.clone()
    codes[6, column] = code
    marked = Packed("FP8_ROW", codes, packed.scales, shape=packed.shape)
    y = fusedops.quantized_linear(normal(1, 1440), marked, backend="cpu")
    assert y.isnan().nonzero().tolist() == [[0, 6]]


@pytest.mark.parametrize("scale", [torch.inf, 1e37, torch.nan])
def test_one_row_of_fp8_and_weights_that_are_not_finite(scale: float) -> None:
    """A sum of them is inf or NaN, whatever the sum of their codes is; the largest x makes 1e37 times 448 small."""
    packed = pack(normal(9, 1440), "FP8_ROW")
    scales = packed.scales.clone()
    scales[6] = scale
    marked, x = Packed("FP8_ROW", packed.codes, scales, shape=packed.shape), normal(1, 1440) * 1e-8
    got = fusedops.quantized_linear(x, marked, backend="cpu")
    with fusedops.use(rows="independent"):
        wanted = fusedops.quantized_linear(x, marked, backend="cpu")
    assert not wanted[0, 6].isfinite()
    assert torch.equal(got.nan_to_num(9.0), wanted.nan_to_num(9.0))
    assert torch.equal(got.isnan(), wanted.isnan())

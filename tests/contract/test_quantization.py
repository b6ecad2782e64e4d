"""The formats of packed weights: the values and bytes of the package gguf."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from fusedops.errors import InvalidInputError
from fusedops.quantization import FORMATS, dequantize, quantize


def gguf_type(gguf: Any, format: str) -> Any:
    """Return the type of a format, whose name here may differ from that of the Hub's format."""
    return gguf.GGMLQuantizationType[format.removesuffix("_GGUF")]


every_format = pytest.mark.parametrize("format", FORMATS)


def random_bytes(format: str, blocks: int = 4096) -> Tensor:
    """Return blocks of random bytes, whose float16 numbers are of every kind: subnormal, infinite, NaN."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (blocks, FORMATS[format].bytes), generator=generator, dtype=torch.uint8)


def weights(columns: int = 512) -> Tensor:
    """Return rows of several sizes, of one sign, of zeros, of equal numbers of both signs."""
    rows = torch.randn(64, columns, generator=torch.Generator().manual_seed(1))
    rows *= torch.logspace(-7, 4, 64)[:, None]
    rows[1], rows[2] = rows[1].abs(), -rows[2].abs()
    rows[3], rows[4, 5:] = 0, 0
    rows[5] = torch.where(torch.arange(columns) % 3 == 1, -2.0, 2.0)
    return rows


@every_format
def test_values_are_those_of_gguf(format: str) -> None:
    gguf = pytest.importorskip("gguf")
    packed = random_bytes(format)
    with numpy.errstate(all="ignore"):
        want = torch.from_numpy(gguf.dequantize(packed.numpy(), gguf_type(gguf, format)))
    got = dequantize(packed, format)
    assert got.shape == (4096, FORMATS[format].weights)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit()[want == 0], want.signbit()[want == 0])


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4_GGUF"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_gguf(format: str, dtype: torch.dtype) -> None:
    gguf = pytest.importorskip("gguf")
    rows = weights().to(dtype)
    with numpy.errstate(all="ignore"):
        want = gguf.quantize(rows.float().numpy(), gguf_type(gguf, format))
    assert torch.equal(quantize(rows, format), torch.from_numpy(want))


@every_format
def test_the_error_is_below_half_a_spacing_of_each_run(format: str) -> None:
    """Of a run the largest number over the levels is the spacing; roundings of the scales add to half of it."""
    run, levels, scales = {
        "Q8_0": (32, 127, 0.0), "Q4_0": (32, 4, 0.0), "Q4_1": (32, 7.5, 0.0), "Q5_0": (32, 8, 0.0),
        "Q5_1": (32, 15.5, 0.0), "Q4_K": (256, 7.5, 0.03), "Q5_K": (256, 15.5, 0.03), "Q6_K": (256, 16, 0.01),
        "MXFP4_GGUF": (32, 2, 0.0), "NVFP4_GGUF": (16, 4.5, 0.1),
    }[format]  # fmt: skip
    rows = torch.randn(32, 512, generator=torch.Generator().manual_seed(2))
    difference = (dequantize(quantize(rows, format), format) - rows).abs()
    largest = rows.view(-1, run).abs().amax(1, keepdim=True)
    assert (difference.view(-1, run) <= largest * (0.55 / levels + scales) + 1e-6).all()
    # the bound is of use: an error of twice the spacing is beyond it
    assert (difference.view(-1, run).amax(1) > largest[:, 0] * 0.1 / levels).all()


@every_format
def test_the_ends_of_the_range(format: str) -> None:
    """A weight at an end has the error of its format; one beyond it is refused, and so is one beyond float32."""
    sizes = FORMATS[format]
    row = torch.linspace(-1, 1, sizes.weights, dtype=torch.float64)[None]
    error = (dequantize(quantize(row, format), format) - row).abs().max()
    for size in (sizes.smallest, sizes.largest):
        packed = dequantize(quantize(row * size, format), format)
        assert packed.isfinite().all()
        assert (packed - row * size).abs().max() <= (error + 0.13) * size
    for size in (0.9 * sizes.smallest, 1.1 * sizes.largest, 1e300):
        with pytest.raises(InvalidInputError, match="beyond the range of"):
            quantize(row * size, format)


@every_format
def test_small_blocks_beside_larger_ones(format: str) -> None:
    """A row of 1e-9 is rounded to about 0; small blocks that the steps of float16 reach keep their numbers."""
    row = torch.linspace(-1, 1, FORMATS[format].weights)
    rows = torch.stack([row, row * 1e-9, row * FORMATS[format].smallest])
    packed = dequantize(quantize(rows, format), format)
    assert (packed[1] - rows[1]).abs().max() <= max(FORMATS[format].smallest / 4, 0.3e-9)
    assert (packed[2] - rows[2]).abs().max() <= 0.3 * FORMATS[format].smallest


@every_format
def test_rows_without_weights_and_of_zeros(format: str) -> None:
    columns = FORMATS[format].weights
    assert dequantize(quantize(torch.zeros(3, columns), format), format).eq(0).all()
    assert dequantize(quantize(torch.zeros(2, 0), format), format).shape == (2, 0)
    assert dequantize(quantize(torch.zeros(0, 2, columns), format), format).shape == (0, 2, columns)


@every_format
def test_strides_of_the_bytes_change_no_weight(format: str) -> None:
    weights = FORMATS[format].weights  # one block a row: its strides reach the arithmetic
    packed = quantize(torch.randn(6, weights, generator=torch.Generator().manual_seed(1)), format)
    want = dequantize(packed, format)
    column = torch.zeros(packed.shape[1], 6, dtype=torch.uint8).t().copy_(packed)  # as column-major files have it
    wide = torch.cat([packed, packed], 1)[:, : packed.shape[1]]
    assert torch.equal(dequantize(column, format), want)
    assert torch.equal(dequantize(wide, format), want)

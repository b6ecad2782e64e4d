"""Packed weights of quantized_linear."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

import fusedops
from fusedops.ops import quantized_linear
from fusedops.quantization import FORMATS, SCALED, Packed, bytes_of_row
from fusedops.testing import random_packed, random_part


def packed_rows(format: str, rows: int, columns: int) -> Tensor:
    sizes = FORMATS[format]
    return random_packed((rows, columns // sizes.weights * sizes.bytes), format, Generator().manual_seed(rows))


def odd_scales(packed: Tensor, format: str) -> Tensor:
    """Give some rows a scale that is subnormal, 0, the largest number, inf or NaN."""
    for at, place in enumerate(FORMATS[format].scales):
        for row, bits in enumerate((0x0001, 0x8001, 0x03FF, 0x0000, 0x8000, 0x7BFF, 0x7C00, 0xFE00)):
            packed[4 * row + at, place] = bits & 255
            packed[4 * row + at, place + 1] = bits >> 8
    return packed


def packed_weight(
    format: str,
    rows: int,
    columns: int,
    *,
    dtype: torch.dtype | None = None,
    group: int = 0,
    zeros: bool = False,
) -> Packed:
    """Return a random packed weight. dtype: of its scales; group: of INT4_GROUP, 0 for one scale a row."""
    generator = Generator().manual_seed(rows)
    codes = random_packed((rows, bytes_of_row(columns, format) or 0), format, generator)
    if format in FORMATS:
        return Packed(format, codes, shape=(rows, columns))
    data = SCALED[format]
    shape = data.scales_shape(rows, columns, columns // group if group else 0)
    scales = random_part("scales", shape, dtype or data.scales[0], format, generator)
    scales = scales.view(torch.float8_e4m3fn) if data.e4m3 else scales
    divisor = torch.tensor(1.7) if data.global_scale else None
    of_zeros = random_part("zeros", shape, torch.uint8, format, generator) if zeros else None
    return Packed(format, codes, scales, divisor, of_zeros, shape=(rows, columns))


def assert_rows_stand_alone(packed: Packed, dtype: torch.dtype) -> None:
    """On the cpu backend, where rows matter: others, their number and the threads change nothing, both ways."""
    outputs, columns = packed.shape
    bias = torch.randn(outputs)
    x, grad = torch.randn(200, columns).to(dtype), torch.randn(200, outputs).to(dtype)

    def both(rows: slice) -> tuple[Tensor, Tensor]:
        part = x[rows].clone().requires_grad_()
        with fusedops.use("cpu", rows="independent"):
            y = quantized_linear(part, packed, bias)
        return y.detach(), torch.autograd.grad(y, part, grad[rows])[0]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = both(slice(None))
        torch.set_num_threads(3)
        for first, count in ((0, 200), (0, 1), (7, 2), (50, 3), (31, 8), (60, 11), (70, 21), (3, 100)):
            rows = slice(first, first + count)
            for got, whole in zip(both(rows), want):
                assert torch.equal(got, whole[rows]), rows
    finally:
        torch.set_num_threads(threads)

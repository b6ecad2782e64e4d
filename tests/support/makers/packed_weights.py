"""Packed weights of quantized_linear."""

from __future__ import annotations

from torch import Generator, Tensor

from fusedops.quantization import FORMATS
from fusedops.testing import random_packed


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

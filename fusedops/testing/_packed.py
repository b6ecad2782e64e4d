"""Random packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.quantization import FORMATS, SCALED


def random_packed(shape: tuple[int, ...], format: str, generator: torch.Generator | None = None) -> Tensor:
    """Return random bytes of a packed weight, whose scales are between 2**-11 and 2**-7, of both signs.

    >>> from fusedops import testing
    >>> testing.random_packed((2, 34), "Q8_0").shape
    torch.Size([2, 34])
    """
    packed = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    if format in SCALED:
        if SCALED[format].bits == 8:
            packed[packed & 0x7F == 0x7F] = 0x35  # NaN
        return packed
    block = FORMATS[format].bytes
    for at in FORMATS[format].scales:
        low, high = packed[..., at::block], packed[..., at + 1 :: block]
        low &= 0x3B  # as the high byte of a float16 number it is finite too: a layout may repeat the first byte
        high &= 0x8F
        high |= 0x10
    for at, low, mask in FORMATS[format].exponents:
        scales = packed[..., at::block]
        scales &= mask
        scales += low
    return packed


def random_part(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, format: str, generator: torch.Generator | None = None
) -> Tensor:
    """Return the scales, the global scale or the zeros of a random packed weight, of numbers as above.

    >>> import torch
    >>> from fusedops.testing import random_part
    >>> random_part("scales", (2, 3), torch.uint8, "MXFP4").shape
    torch.Size([2, 3])
    """
    if name == "zeros":
        return torch.randint(17, shape, generator=generator, dtype=torch.uint8)
    if dtype is torch.uint8:
        scales = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        return scales & 0xBF if SCALED[format].e4m3 else 116 + scales % 5
    if name == "global_scale":
        return (torch.rand(shape, generator=generator) + 0.5).to(dtype)
    scales = torch.rand(shape, generator=generator) * 2.0**-7 + 2.0**-11
    return torch.where(torch.rand(shape, generator=generator) < 0.3, -scales, scales).to(dtype)

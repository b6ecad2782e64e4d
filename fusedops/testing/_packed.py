"""Random packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.quantization import FORMATS


def random_packed(shape: tuple[int, ...], format: str, generator: torch.Generator | None = None) -> Tensor:
    """Return random bytes of a packed weight, whose float16 numbers are between 2**-11 and 2**-7, of both signs.

    >>> from fusedops import testing
    >>> testing.random_packed((2, 34), "Q8_0").shape
    torch.Size([2, 34])
    """
    packed = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    block = FORMATS[format].bytes
    for at in FORMATS[format].scales:
        low, high = packed[..., at::block], packed[..., at + 1 :: block]
        low &= 0x3B  # as the high byte of a float16 number it is finite too: a layout may repeat the first byte
        high &= 0x8F
        high |= 0x10
    return packed

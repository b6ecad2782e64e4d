"""The values of packed blocks, (blocks, bytes) to (blocks, weights) in float32, as ``gguf.quants`` computes them.

In comments, ``d`` and ``m`` are float16 numbers of a block, and ``q`` the integer of a weight. Products of ``d``, a
scale and ``q`` are exact in float32; the sum with ``m`` is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def split(blocks: Tensor, *sizes: int) -> Tensor:
    """Return (blocks, n) as (blocks, *sizes)."""
    return blocks.reshape(blocks.shape[0], *sizes)


def half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 number at an offset in bytes of each block as float32: (blocks, 1)."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(data: Tensor, run: int) -> Tensor:
    """Return 4-bit numbers: of each ``run`` bytes the low halves, then the high ones. (blocks, 2 * bytes)."""
    runs = split(data, data.shape[1] // run, 1, run)
    return (shifted(runs, (0, 4)) & 15).flatten(1)


def shifted(data: Tensor, shifts: Sequence[int]) -> Tensor:
    """Return bytes (blocks, runs, 1, run) shifted down by each of some counts of bits: (blocks, runs, shifts, run)."""
    return data >> torch.tensor(shifts, dtype=torch.uint8, device=data.device)[:, None]


def fifth_bits(data: Tensor) -> Tensor:
    """Return 16 for each bit that is set of the bytes (blocks, 4), the lowest first: (blocks, 32)."""
    indices = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data[..., None] >> indices) & 1).view(data.shape[0], 32) << 4


def q8_0(blocks: Tensor) -> Tensor:
    """d, then 32 int8 numbers: d * q."""
    return blocks[:, 2:].contiguous().view(torch.int8).float() * half(blocks, 0)


def q4_0(blocks: Tensor) -> Tensor:
    """d, then 32 numbers of 4 bits: d * (q - 8)."""
    return (nibbles(blocks[:, 2:], 16).float() - 8) * half(blocks, 0)


def q4_1(blocks: Tensor) -> Tensor:
    """d, m, then 32 numbers of 4 bits: d * q + m."""
    return nibbles(blocks[:, 4:], 16).float() * half(blocks, 0) + half(blocks, 2)


def q5_0(blocks: Tensor) -> Tensor:
    """d, 32 fifth bits, then 32 numbers of 4 bits: d * (q - 16)."""
    q = nibbles(blocks[:, 6:], 16) | fifth_bits(blocks[:, 2:6])
    return (q.float() - 16) * half(blocks, 0)


def q5_1(blocks: Tensor) -> Tensor:
    """d, m, 32 fifth bits, then 32 numbers of 4 bits: d * q + m."""
    q = nibbles(blocks[:, 8:], 16) | fifth_bits(blocks[:, 4:8])
    return q.float() * half(blocks, 0) + half(blocks, 2)


def six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 8 scales and 8 minima of Q4_K and Q5_K, (blocks, 8, 1), from the 12 bytes after d and m.

    Bytes 0 to 3 and 4 to 7 have the low 6 bits of the first four scales and minima, and in their high 2 bits the high
    bits of the last four, whose low 4 bits are the halves of bytes 8 to 11.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], 1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], 1)
    return scales.float()[..., None], minima.float()[..., None]


def q4_k(blocks: Tensor) -> Tensor:
    """d, m, the 12 bytes, then 256 numbers of 4 bits: (d * scale) * q - m * minimum."""
    scales, minima = six_bit_scales(blocks)
    q = split(nibbles(blocks[:, 16:], 32), 8, 32).float()
    values = (half(blocks, 0)[..., None] * scales) * q - half(blocks, 2)[..., None] * minima
    return values.flatten(1)


def q5_k(blocks: Tensor) -> Tensor:
    """d, m, the 12 bytes, 32 bytes of fifth bits, of which bit i is of run i of 32, then 256 numbers of 4 bits."""
    scales, minima = six_bit_scales(blocks)
    fifth = (shifted(blocks[:, None, None, 16:48], range(8)) & 1) << 4
    q = (split(nibbles(blocks[:, 48:], 32), 8, 32) | fifth[:, 0]).float()
    values = (half(blocks, 0)[..., None] * scales) * q - half(blocks, 2)[..., None] * minima
    return values.flatten(1)


def q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of low 4 bits, 64 of high 2 bits, 16 int8 scales, d: (d * scale) * (q - 32)."""
    low = split(nibbles(blocks[:, :128], 64), 8, 32)
    high = split(shifted(split(blocks[:, 128:192], 2, 1, 32), (0, 2, 4, 6)) & 3, 8, 32)
    q = split((low | (high << 4)).float(), 16, 16) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * half(blocks, 208)
    return (scales[..., None] * q).flatten(1)


_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # E2M1 as integers, which have no -0


def half_power(exponents: Tensor) -> Tensor:
    """Return ``2**(e - 128)`` of bytes in float32."""
    wide = exponents.to(torch.int32)
    return torch.where(wide < 2, 0x00200000 << wide.clamp(max=1), (wide - 1).clamp(min=0) << 23).view(torch.float32)


def half_ue4m3(scales: Tensor) -> Tensor:
    """Return half of the unsigned e4m3 numbers of bytes in float32; 0x7F is 0, as in ``gguf.quants``."""
    wide = scales.to(torch.int32)
    exponent, mantissa = (wide >> 3) & 15, (wide & 7).float()
    normal = (1 + mantissa / 8) * half_power((exponent + 120).to(torch.uint8)) * 2
    numbers = torch.where(exponent == 0, mantissa * 2.0**-9, normal) * 0.5
    return numbers.masked_fill(wide == 0x7F, 0.0)


def _doubled(codes: Tensor) -> Tensor:
    return torch.tensor(_DOUBLED, dtype=torch.float32, device=codes.device)[codes.int()]


def mxfp4(blocks: Tensor) -> Tensor:
    """e, then 32 codes of 4 bits: ``2**(e - 128)`` times the integer of a code."""
    return _doubled(nibbles(blocks[:, 1:], 16)) * half_power(blocks[:, :1])


def nvfp4(blocks: Tensor) -> Tensor:
    """4 bytes of unsigned e4m3, then 64 codes of 4 bits, of which the halves of 8 bytes are a run of 16."""
    codes = split(nibbles(blocks[:, 4:], 8), 4, 16)
    return (_doubled(codes) * half_ue4m3(blocks[:, :4])[..., None]).flatten(1)


UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "MXFP4_GGUF": mxfp4,
    "NVFP4_GGUF": nvfp4,
}

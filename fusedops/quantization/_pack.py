"""Blocks of weights to packed blocks, (blocks, weights) in float32 to (blocks, bytes)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedops.quantization import _scaled
from fusedops.quantization._formats import E2M1
from fusedops.quantization._unpack import half_ue4m3, split


def _as_bytes(numbers: Tensor) -> Tensor:
    """Return numbers (blocks, n) as the bytes of float16."""
    return numbers.to(torch.float16).contiguous().view(torch.uint8)


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, torch.zeros_like(d), 1 / d)


def _in_halves(q: Tensor, run: int) -> Tensor:
    """Return numbers of 4 bits in bytes: of each 2 * ``run``, the first are the low halves. See _unpack.nibbles."""
    pairs = split(q & 15, q.shape[1] // (2 * run), 2, run)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).flatten(1)


def _fifth_bits(q: Tensor) -> Tensor:
    """Return bit 4 of 32 numbers as 4 bytes, the lowest bit first."""
    indices = torch.arange(8, dtype=torch.uint8, device=q.device)
    return (split(q >> 4, 4, 8) << indices).sum(-1, dtype=torch.uint8)


def _first_largest(blocks: Tensor) -> Tensor:
    """Return the first number of the largest magnitude of each block, with its sign: (blocks, 1)."""
    size = blocks.abs()
    indices = torch.arange(blocks.shape[1], device=blocks.device).expand_as(blocks)
    first = indices.masked_fill(size != size.amax(1, keepdim=True), blocks.shape[1]).amin(1, keepdim=True)
    return blocks.gather(1, first)


def _symmetric(blocks: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return d and q such that d * (q - levels) is near each weight, and exact for the largest: 0 <= q < 2 * levels."""
    d = _first_largest(blocks) / -levels
    q = (blocks * _inverse(d) + (levels + 0.5)).to(torch.uint8).clamp(0, 2 * levels - 1)
    return d, q


def _affine(blocks: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return d, m and q such that d * q + m is near each weight: 0 <= q <= most."""
    m = blocks.amin(1, keepdim=True)
    d = (blocks.amax(1, keepdim=True) - m) / most
    return d, m, ((blocks - m) * _inverse(d) + 0.5).to(torch.uint8).clamp(0, most)


def q8_0(blocks: Tensor) -> Tensor:
    """Half of a spacing rounds away from 0."""
    d = blocks.abs().amax(1, keepdim=True) / 127
    scaled = blocks * _inverse(d)
    size = scaled.abs()
    whole = size.floor()
    q = scaled.sign() * (whole + (2 * (size - whole)).floor())
    return torch.cat([_as_bytes(d), q.to(torch.int8).view(torch.uint8)], 1)


def q4_0(blocks: Tensor) -> Tensor:
    """See _unpack, as for all that follow."""
    d, q = _symmetric(blocks, 8)
    return torch.cat([_as_bytes(d), _in_halves(q, 16)], 1)


def q4_1(blocks: Tensor) -> Tensor:
    d, m, q = _affine(blocks, 15)
    return torch.cat([_as_bytes(d), _as_bytes(m), _in_halves(q, 16)], 1)


def q5_0(blocks: Tensor) -> Tensor:
    d, q = _symmetric(blocks, 16)
    return torch.cat([_as_bytes(d), _fifth_bits(q), _in_halves(q, 16)], 1)


def q5_1(blocks: Tensor) -> Tensor:
    d, m, q = _affine(blocks, 31)
    return torch.cat([_as_bytes(d), _as_bytes(m), _fifth_bits(q), _in_halves(q, 16)], 1)


def _with_scales(blocks: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return d, m and the 12 bytes of six-bit scales and minima as bytes, and q: 0 <= q <= most."""
    runs = split(blocks, 8, 32)
    low = runs.amin(2).clamp(max=0)
    spacing = (runs.amax(2) - low).clamp(min=0) / most
    d, m = (_rounded(each.amax(1, keepdim=True) / 63) for each in (spacing, -low))
    scales, minima = ((each * _inverse(unit)).round().clamp(0, 63) for each, unit in ((spacing, d), (-low, m)))
    q = ((runs + (m * minima)[..., None]) * _inverse(d * scales)[..., None]).round().clamp(0, most).to(torch.uint8)
    s, n = scales.to(torch.uint8), minima.to(torch.uint8)
    first = [each[:, :4] | ((each[:, 4:] >> 4) << 6) for each in (s, n)]
    third = (s[:, 4:] & 15) | ((n[:, 4:] & 15) << 4)
    return torch.cat([_as_bytes(d), _as_bytes(m), *first, third], 1), q.flatten(1)


def _rounded(numbers: Tensor) -> Tensor:
    """Return numbers of float16: the nearest, but below 2**-14, where they are 2**-24 apart, the next away from 0."""
    steps = numbers.abs() * 2.0**24
    return torch.where(steps < 2**10, numbers.sign() * steps.ceil() * 2.0**-24, numbers).to(torch.float16).float()


def q4_k(blocks: Tensor) -> Tensor:
    head, q = _with_scales(blocks, 15)
    return torch.cat([head, _in_halves(q, 32)], 1)


def q5_k(blocks: Tensor) -> Tensor:
    head, q = _with_scales(blocks, 31)
    indices = torch.arange(8, dtype=torch.uint8, device=q.device)[:, None]
    fifth = (split(q >> 4, 8, 32) << indices).sum(1, dtype=torch.uint8)
    return torch.cat([head, fifth, _in_halves(q, 32)], 1)


def q6_k(blocks: Tensor) -> Tensor:
    runs = split(blocks, 16, 16)
    spacing = _first_largest(runs.flatten(0, 1)).view(runs.shape[:2]) / -32
    d = _rounded(_first_largest(spacing) / -128)
    scales = (spacing * _inverse(d)).round().clamp(-128, 127)
    q = (runs * _inverse(d * scales)[..., None]).round().clamp(-32, 31).add(32).to(torch.uint8).flatten(1)
    low = _in_halves(q, 64)
    high = split(q >> 4, 2, 4, 32) << torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=q.device)[:, None]
    return torch.cat(
        [low, high.sum(2, dtype=torch.uint8).flatten(1), scales.to(torch.int8).view(torch.uint8), _as_bytes(d)], 1
    )


def mxfp4(blocks: Tensor) -> Tensor:
    codes, powers = _scaled.mxfp4(blocks)
    format = _scaled.SCALED["MXFP4"]
    return torch.cat([powers, _in_halves(_scaled.codes_of(codes, format), 16)], 1)


def nvfp4(blocks: Tensor) -> Tensor:
    """The scale of 16 weights is the nearest to a sixth of the largest."""
    runs = split(blocks, 4, 16)
    scales = (runs.abs().amax(2) / 6).clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    d = 2 * half_ue4m3(scales)[..., None]
    codes = _scaled.nearest(runs * _inverse(d), E2M1)
    return torch.cat([scales, _in_halves(codes.flatten(1), 8)], 1)


PACK: dict[str, Callable[[Tensor], Tensor]] = {
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

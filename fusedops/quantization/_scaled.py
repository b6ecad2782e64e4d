"""The numbers of codes and scales that are tensors of their own, and the codes of numbers.

Here codes are bytes (..., N, bytes of a row), scales (..., N, groups) or fewer rows, as ``_formats.py`` has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.quantization._formats import E2M1, NF4, SCALED, Scaled


def e8m0(codes: Tensor) -> Tensor:
    """Return ``2**(code - 127)`` of bytes in float32, also of 0; 255 is NaN."""
    wide = codes.to(torch.int32)
    bits = (wide << 23).masked_fill(wide == 0, 0x00400000).masked_fill(wide == 255, 0x7FC00000)
    return bits.view(torch.float32)


def float_scales(scales: Tensor, global_scale: Tensor | None, format: Scaled) -> Tensor:
    """Return scales as float32, divided by the global one, () or (E,)."""
    if scales.dtype is not torch.uint8:
        found = scales.float()
    else:
        found = scales.view(torch.float8_e4m3fn).float() if format.e4m3 else e8m0(scales)
    if global_scale is None:
        return found
    return found / global_scale.float().reshape(*scales.shape[:-2], 1, 1)


def codes_of(codes: Tensor, format: Scaled) -> Tensor:
    """Return the codes of 4 bits as bytes of their own, in the order of the columns: (..., 2 * bytes of a row)."""
    pair = (codes >> 4, codes & 15) if format.high_first else (codes & 15, codes >> 4)
    return torch.stack(pair, -1).flatten(-2)


def numbers_of(codes: Tensor, format: Scaled) -> Tensor:
    """Return the numbers of codes, without scales and zeros, in float32."""
    if format.values is None:
        return codes.view(torch.float8_e4m3fn).float()
    table = torch.tensor(format.values, dtype=torch.float32, device=codes.device)
    return table[codes_of(codes, format).int()]


def unpack_rows(
    name: str,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None = None,
    zeros: Tensor | None = None,
    start: int = 0,
    stop: int | None = None,
    by_row: bool = False,
) -> Tensor:
    """Return some rows of the weight in float32, (..., rows, K). by_row: scales of several rows are those of each."""
    format = SCALED[name]
    format = format._replace(rows=1) if by_row and format.rows else format
    stop = codes.shape[-2] if stop is None else stop
    part = codes[..., start:stop, :].resolve_neg()
    of_scales = slice(0, 1) if not format.rows else slice(start // format.rows, -(-stop // format.rows))
    scale = float_scales(scales[..., of_scales, :].resolve_neg(), global_scale, format)
    numbers = numbers_of(part, format)
    if format.rows > 1:
        rows = torch.arange(start, stop, device=codes.device) // format.rows - of_scales.start
        scale = scale[..., rows, :]
    if zeros is not None:
        centre = zeros[..., start:stop, :].float() - 8
        numbers = numbers - _along(centre, numbers.shape[-1], format)
    return numbers * _along(scale, numbers.shape[-1], format)


def _along(groups: Tensor, columns: int, format: Scaled) -> Tensor:
    """Return the number of each column from that of each group, the last of which may be partial."""
    if groups.shape[-1] == 1:
        return groups
    size = format.group or columns // max(groups.shape[-1], 1)
    return groups.repeat_interleave(size, -1)[..., :columns]


def nearest(numbers: Tensor, values: tuple[float, ...]) -> Tensor:
    """Return the code of the nearest value, as bytes; of two that are as near, that of the first one."""
    table = torch.tensor(values, dtype=torch.float32, device=numbers.device)
    found = torch.zeros_like(numbers, dtype=torch.uint8)
    best = (numbers - table[0]).abs()
    for code in range(1, len(values)):
        distance = (numbers - table[code]).abs()
        found = torch.where(distance < best, code, found)
        best = torch.minimum(distance, best)
    return found


def in_pairs(codes: Tensor, high_first: bool = False) -> Tensor:
    """Return codes of 4 bits, two in a byte."""
    first, second = codes[..., ::2], codes[..., 1::2]
    return (first << 4) | second if high_first else first | (second << 4)


def in_groups(weight: Tensor, size: int) -> Tensor:
    """Return (..., K) as (..., K / size, size)."""
    return weight.reshape(*weight.shape[:-1], weight.shape[-1] // size, size)


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of E2M1 and the bytes of E8M0 of each 32 weights, as ``gguf.quants`` has them."""
    blocks = in_groups(weight, 32)
    largest = blocks.abs().amax(-1, keepdim=True)
    power = torch.where(largest > 0, largest.log2().floor() + 125, 0.0).clamp(0, 254).to(torch.uint8)
    codes = nearest(blocks / e8m0(power), E2M1)
    return in_pairs(codes.flatten(-2)), power[..., 0]


def nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of E2M1, the e4m3 scales of each 16 weights, and the number that divides them."""
    blocks = in_groups(weight, 16)
    largest = blocks.abs().amax(-1, keepdim=True)
    of_all = weight.abs().amax((-2, -1)) if weight.numel() else weight.new_zeros(weight.shape[:-2])
    divisor = torch.where(of_all > 0, 448.0 * 6.0 / of_all, 1.0)
    wide = divisor[..., None, None, None]
    scales = (largest / 6.0 * wide).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
    codes = nearest(blocks / (scales.float() / wide), E2M1)
    return in_pairs(codes.flatten(-2)), scales[..., 0], divisor


def fp8(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return numbers of float8_e4m3fn and float32 scales: the largest number of each block is about 448."""
    format = SCALED[name]
    outputs, columns = weight.shape[-2:]
    size = weight.abs()
    if name == "FP8_BLOCK":
        size = torch.nn.functional.pad(size, (0, -columns % 128, 0, -outputs % 128))
        largest = in_groups(in_groups(size, 128).amax(-1).mT, 128).amax(-1).mT
    else:
        largest = size.amax((-2, -1) if not format.rows else -1, keepdim=True)
    scales = torch.where(largest > 0, largest / 448.0, 1.0)
    wide = scales
    if name == "FP8_BLOCK":
        wide = scales.repeat_interleave(128, -1)[..., :columns].repeat_interleave(128, -2)[..., :outputs, :]
    return (weight / wide).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scales


def fp4_group32(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of E2M1 and a float32 scale of each 32 weights."""
    blocks = in_groups(weight, 32)
    scales = blocks.abs().amax(-1, keepdim=True) / 6.0
    codes = nearest(blocks / torch.where(scales > 0, scales, 1.0), E2M1)
    return in_pairs(codes.flatten(-2)).view(torch.int8), scales[..., 0]


def int4_group(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes (..., K), scales (..., G), and zeros (..., G) unless symmetric, of groups of a row."""
    blocks = in_groups(weight, group)
    if symmetric:
        scales, zeros = blocks.abs().amax(-1, keepdim=True) / 7.5, 8.0
    else:
        low, high = blocks.amin(-1, keepdim=True).clamp(max=0), blocks.amax(-1, keepdim=True).clamp(min=0)
        scales = (high - low) / 15.0
        scales = torch.where(scales > 0, scales, 1.0)
        zeros = (-low / scales).round().clamp(0, 15)
    codes = ((blocks / torch.where(scales > 0, scales, 1.0)).round() + zeros).clamp(0, 15).to(torch.uint8)
    found = zeros[..., 0].to(torch.uint8) if isinstance(zeros, Tensor) else None
    return codes.flatten(-2), scales[..., 0], found


def nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of NF4 and the largest magnitude of each 64 weights, both flat, as bitsandbytes has them."""
    blocks = weight.reshape(-1, 64)
    largest = blocks.abs().amax(-1)
    numbers = (blocks * (1.0 / largest.clamp(min=1e-38))[:, None]).clamp(-1, 1)
    table = torch.tensor(NF4, dtype=torch.float32, device=weight.device)
    codes = torch.bucketize(numbers, (table[:-1] + table[1:]) / 2).to(torch.uint8)
    return in_pairs(codes.flatten(), high_first=True)[:, None], largest

"""Packed weights: the block formats of GGUF files, which have 4 to 8 bits for each weight.

A packed weight is a uint8 tensor (..., bytes of a row), whose rows are blocks one after another, exactly as a GGUF file
stores them. :func:`dequantize` returns the value of each weight as the package ``gguf`` does, bit for bit, and so does
:func:`quantize` for the formats that ``gguf`` can write.

>>> import torch, fusedops
>>> packed = fusedops.quantization.quantize(torch.linspace(-1, 1, 64).view(2, 32), "Q8_0")
>>> packed.shape, packed.dtype
(torch.Size([2, 34]), torch.uint8)
>>> fusedops.quantization.dequantize(packed, "Q8_0")[0, :3]
tensor([-0.9999, -0.9684, -0.9370])
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.errors import InvalidInputError

__all__ = ["FORMATS", "Format", "bytes_of_row", "dequantize", "quantize"]


class Format(NamedTuple):
    """The sizes of a block.

    Attributes:
        weights: of a block.
        bytes: of a block.
        scales: the offsets, in bytes, of the float16 numbers of a block.
        smallest: of a weight's largest magnitude, unless it is 0. The steps of float16 near 0 then change no number by
            more than 1/8 of that.
        largest: of a weight's magnitudes. The float16 numbers of its blocks are then finite.

    >>> import fusedops
    >>> fusedops.quantization.FORMATS["Q4_K"].weights
    256
    """

    weights: int
    bytes: int
    scales: tuple[int, ...]
    smallest: float
    largest: float


def _format_of(weights: int, bytes: int, scales: tuple[int, ...], levels: int, factor: int) -> Format:
    """Return a format: ``levels`` spacings from 0 to the largest number, which is ``factor`` of a float16 number."""
    return Format(weights, bytes, scales, levels * 2.0**-22, factor * 65504.0)  # 8 roundings of 2**-25; float16's max


#: The formats by name, each with the sizes of its block.
FORMATS = {
    "Q8_0": _format_of(32, 34, (0,), 127, 127),
    "Q4_0": _format_of(32, 18, (0,), 8, 8),
    "Q4_1": _format_of(32, 20, (0, 2), 15, 1),
    "Q5_0": _format_of(32, 22, (0,), 16, 16),
    "Q5_1": _format_of(32, 24, (0, 2), 31, 1),
    "Q4_K": _format_of(256, 144, (0, 2), 15, 63),
    "Q5_K": _format_of(256, 176, (0, 2), 31, 63),
    "Q6_K": _format_of(256, 210, (208,), 32, 32 * 128),
}
_CHUNK = 2**20  # weights that are converted at once: the memory beside argument and result is a few times this


def bytes_of_row(weights: int, format: str) -> int | None:
    """Return the bytes of a row of so many weights, None where they are no whole number of blocks.

    >>> import fusedops
    >>> fusedops.quantization.bytes_of_row(576, "Q8_0"), fusedops.quantization.bytes_of_row(576, "Q4_K")
    (612, None)
    """
    sizes = FORMATS[format]
    return None if weights % sizes.weights else weights // sizes.weights * sizes.bytes


def quantize(weight: Tensor, format: str) -> Tensor:
    """Pack a weight.

    Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 are packed as ``gguf.quantize`` packs them, bit for bit. Q4_K, Q5_K and Q6_K, which
    it does not write, are rounded to the nearest of evenly spaced values: for each 32 weights (Q6_K: 16) between their
    smallest value, or 0, and their largest, whose spacing and smallest value are rounded to 6 bits (Q6_K: 8) of the
    largest of the block. llama.cpp searches for spacings with a smaller error.

    The scales of a block are float16 numbers, which end at 65504 and have steps of 6e-8 near 0. So blocks of numbers
    below some 1e-7 become 0, as in ``gguf``, beside larger ones elsewhere in the weight; a weight that is beyond the
    range as a whole is refused.

    Args:
        weight: (..., K), float16, bfloat16, float32 or float64, finite. Its largest magnitude is 0 or from
            ``FORMATS[format].smallest`` to ``FORMATS[format].largest``: from 3e-5 to 8e6 for Q8_0.
        format: one of ``FORMATS``.

    Returns:
        uint8, (..., bytes of a row), on the device of ``weight``.

    Raises:
        InvalidInputError: an argument is not as above, or K is not a multiple of the block.

    Source: gguf, ``gguf.quants.quantize``.

    >>> import torch, fusedops
    >>> fusedops.quantization.quantize(torch.ones(3, 256), "Q4_K").shape
    torch.Size([3, 144])
    """
    sizes = _format("quantize", format)
    if not weight.is_floating_point() or weight.dim() == 0:
        raise InvalidInputError(
            f"quantize: got a weight of {weight.dtype} and shape {tuple(weight.shape)}, expected floating numbers "
            f"(..., K); to fix: pass the weight of a linear layer, such as layer.weight"
        )
    if weight.shape[-1] % sizes.weights:
        raise InvalidInputError(
            f"quantize: got a weight of shape {tuple(weight.shape)}, expected a last dim that is a multiple of "
            f"{sizes.weights}, the block of {format}; to fix: {_other_format(weight.shape[-1])}"
        )
    if beyond := beyond_range(weight, format):
        expected = (
            f"a largest magnitude of 0, or from {sizes.smallest:.2g} to {sizes.largest:.2g}; to fix: leave the weight "
            f"as it is, or scale it, and divide its results by the scale"
            if "range" in beyond
            else "finite numbers; to fix: replace them, as with weight.nan_to_num()"
        )
        raise InvalidInputError(f"quantize: got a weight with {beyond}, expected {expected}")
    blocks = weight.detach().reshape(weight.numel() // sizes.weights, sizes.weights)
    from fusedops.quantization import _pack  # by the first use, not by the import: the ops read FORMATS alone

    packed = blocks.new_empty((blocks.shape[0], sizes.bytes), dtype=torch.uint8)
    step = _CHUNK // sizes.weights
    for start in range(0, blocks.shape[0], step):
        packed[start : start + step] = _pack.PACK[format](blocks[start : start + step].float())
    return packed.view(*weight.shape[:-1], weight.shape[-1] // sizes.weights * sizes.bytes)


def beyond_range(weight: Tensor, format: str) -> str:
    """Return which numbers of a weight a format cannot hold; empty where it holds them.

    >>> import torch, fusedops
    >>> fusedops.quantization.beyond_range(torch.full((1, 32), 1e7), "Q8_0")
    'numbers up to 1e+07, beyond the range of Q8_0'
    """
    low, high = (each.item() for each in weight.detach().aminmax()) if weight.numel() else (0.0, 0.0)
    size = max(-low, high)
    if not math.isfinite(size):
        return "inf or NaN"
    sizes = FORMATS[format]
    if size == 0 or sizes.smallest <= size <= sizes.largest:
        return ""
    return f"numbers up to {size:.3g}, beyond the range of {format}"


def dequantize(packed: Tensor, format: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights of packed rows.

    Args:
        packed: uint8, (..., bytes of a row).
        format: one of ``FORMATS``.
        dtype: of the result; the values are float32, and are rounded to it.

    Returns:
        (..., K), the values of ``gguf.dequantize``, bit for bit.

    Raises:
        InvalidInputError: an argument is not as above, or the bytes of a row are no whole number of blocks.

    Source: gguf, ``gguf.quants.dequantize``.

    >>> import torch, fusedops
    >>> fusedops.quantization.dequantize(torch.zeros(2, 36, dtype=torch.uint8), "Q4_0").shape
    torch.Size([2, 64])
    """
    sizes = _format("dequantize", format)
    if packed.dtype is not torch.uint8 or packed.dim() == 0 or packed.shape[-1] % sizes.bytes:
        raise InvalidInputError(
            f"dequantize: got a tensor of {packed.dtype} and shape {tuple(packed.shape)}, expected uint8 with a last "
            f"dim that is a multiple of {sizes.bytes}, the bytes of a block of {format}; to fix: pass what quantize "
            f"returned, or the data of a GGUF tensor, with its format"
        )
    # a negative view would stay one as float16, and bytes of other strides cannot be viewed as numbers
    blocks = packed.resolve_neg().reshape(packed.numel() // sizes.bytes, sizes.bytes).contiguous()
    columns = packed.shape[-1] // sizes.bytes * sizes.weights
    from fusedops.quantization import _unpack

    return _unpack.UNPACK[format](blocks).to(dtype).view(*packed.shape[:-1], columns)


def _format(name: str, format: str) -> Format:
    if format not in FORMATS:
        raise InvalidInputError(
            f"{name}: got format = {format!r}, expected one of {', '.join(FORMATS)}; to fix: pass one of these"
        )
    return FORMATS[format]


def _other_format(weights: int) -> str:
    """Return the fix for a row whose weights are no whole number of blocks."""
    others = [name for name, sizes in FORMATS.items() if weights % sizes.weights == 0]
    return f"use {', '.join(others)}, or leave the weight as it is" if others else "leave the weight as it is"

"""The block formats of GGUF files and rows of int8: one tensor of bytes, with the scales among the codes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops._named_tuple import NamedTuple
from fusedops.errors import InvalidInputError
from fusedops.quantization._formats import SCALED


class Format(NamedTuple):
    """The sizes of a block.

    Attributes:
        weights: of a block.
        bytes: of a block.
        scales: the offsets, in bytes, of the float16 numbers of a block.
        smallest: of a weight's largest magnitude, unless it is 0. The steps of float16 near 0 then change no number by
            more than 1/8 of that.
        largest: of a weight's magnitudes. The float16 numbers of its blocks are then finite.
        exponents: of each byte with a scale its offset, a usual one, and a mask of the bits by which it differs.

    >>> import fusedops
    >>> fusedops.quantization.FORMATS["Q4_K"].weights
    256
    """

    weights: int
    bytes: int
    scales: tuple[int, ...]
    smallest: float
    largest: float
    exponents: tuple[tuple[int, int, int], ...] = ()


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
    "MXFP4_GGUF": Format(32, 17, (), 2.0**-120, 2.0**127, ((0, 116, 3),)),
    "NVFP4_GGUF": Format(64, 36, (), 6 * 2.0**-7, 6 * 448.0, tuple((at, 0, 0x3F) for at in range(4))),
}
INT8 = "INT8"
#: The formats of layers: these, and INT8.
LAYER_FORMATS = (*FORMATS, INT8)
_SCALE_BYTES = 4  # after a row of INT8. Its weights are a multiple: a view of the row as float32 has the scale
_CHUNK = 2**20  # weights that are converted at once: the memory beside argument and result is a few times this


def bytes_of_row(weights: int, format: str) -> int | None:
    """Return the bytes of a row of so many weights, without scales that are a tensor of their own.

    None where they are no whole number of blocks.

    >>> import fusedops
    >>> fusedops.quantization.bytes_of_row(576, "Q8_0"), fusedops.quantization.bytes_of_row(576, "Q4_K")
    (612, None)
    """
    if weights % block_of(format):
        return None
    if format in SCALED:
        return weights * SCALED[format].bits // 8
    return weights + _SCALE_BYTES if format == INT8 else weights // FORMATS[format].weights * FORMATS[format].bytes


def weights_of_row(size: int, format: str) -> int:
    """Return the weights of a row of so many bytes.

    >>> from fusedops.quantization import weights_of_row
    >>> weights_of_row(612, "Q8_0"), weights_of_row(580, "INT8")
    (576, 576)
    """
    if format in SCALED:
        return size * 8 // SCALED[format].bits
    return size - _SCALE_BYTES if format == INT8 else size // FORMATS[format].bytes * FORMATS[format].weights


def block_of(format: str) -> int:
    """Return of how many weights a row is a multiple.

    >>> from fusedops.quantization import block_of
    >>> block_of("Q8_0"), block_of("INT8")
    (32, 4)
    """
    if format in SCALED:
        return SCALED[format].multiple
    return _SCALE_BYTES if format == INT8 else FORMATS[format].weights


def int8_parts(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight (N, K), int8, and its scales (N,), float32, of rows of INT8: views of their bytes,
    where these are contiguous and aligned.

    >>> import torch, fusedops
    >>> from fusedops.quantization import int8_parts
    >>> int8_parts(fusedops.quantization.quantize(torch.tensor([[1.0, 0.0, -127.0, 0.5]]), "INT8"))
    (tensor([[   1,    0, -127,    0]], dtype=torch.int8), tensor([1.]))
    """
    if not packed.is_contiguous() or packed.storage_offset() % _SCALE_BYTES:  # bytes of a user's own state dict
        packed = packed.clone(memory_format=torch.contiguous_format)
    return packed.view(torch.int8)[..., :-_SCALE_BYTES], packed.view(torch.float32)[..., -1]


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
        format: one of ``FORMATS``, or "INT8", of which K is a multiple of 4.

    Returns:
        uint8, (..., bytes of a row), on the device of ``weight``.

    Raises:
        InvalidInputError: an argument is not as above, or K is not a multiple of the block.

    Source: gguf, ``gguf.quants.quantize``.

    >>> import torch, fusedops
    >>> fusedops.quantization.quantize(torch.ones(3, 256), "Q4_K").shape
    torch.Size([3, 144])
    """
    _check_format("quantize", format)
    if not weight.is_floating_point() or weight.dim() == 0:
        raise InvalidInputError(
            f"quantize: got a weight of {weight.dtype} and shape {tuple(weight.shape)}, expected floating numbers "
            f"(..., K); to fix: pass the weight of a linear layer, such as layer.weight"
        )
    if weight.shape[-1] % block_of(format):
        raise InvalidInputError(
            f"quantize: got a weight of shape {tuple(weight.shape)}, expected a last dim that is a multiple of "
            f"{block_of(format)}, the block of {format}; to fix: {_other_format(weight.shape[-1])}"
        )
    if beyond := beyond_range(weight, format):
        low, high = _range(format)
        expected = (
            f"a largest magnitude of 0, or from {low:.2g} to {high:.2g}; to fix: leave the weight "
            f"as it is, or scale it, and divide its results by the scale"
            if "range" in beyond
            else "finite numbers; to fix: replace them, as with weight.nan_to_num()"
        )
        raise InvalidInputError(f"quantize: got a weight with {beyond}, expected {expected}")
    if format == INT8:
        return _packed_int8(weight.detach())
    sizes = FORMATS[format]
    blocks = weight.detach().reshape(weight.numel() // sizes.weights, sizes.weights)
    from fusedops.quantization import _pack  # by the first use, not by the import: the ops read FORMATS alone

    packed = blocks.new_empty((blocks.shape[0], sizes.bytes), dtype=torch.uint8)
    step = _CHUNK // sizes.weights
    for start in range(0, blocks.shape[0], step):
        packed[start : start + step] = _pack.PACK[format](blocks[start : start + step].float())
    return packed.view(*weight.shape[:-1], weight.shape[-1] // sizes.weights * sizes.bytes)


def _packed_int8(weight: Tensor) -> Tensor:
    """Pack a weight in INT8, some rows at a time."""
    columns = weight.shape[-1]
    rows = weight.reshape(weight.shape[:-1].numel(), columns)
    packed = rows.new_empty((rows.shape[0], columns + _SCALE_BYTES), dtype=torch.uint8)
    step = max(_CHUNK // max(columns, 1), 1)
    for start in range(0, rows.shape[0], step):
        q, scale = quantize_rows(rows[start : start + step])
        packed[start : start + step] = torch.cat((q.view(torch.uint8), scale[:, None].view(torch.uint8)), -1)
    return packed.view(*weight.shape[:-1], columns + _SCALE_BYTES)


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
    low, high = _range(format)
    if size == 0 or low <= size <= high:
        return ""
    return f"numbers up to {size:.3g}, beyond the range of {format}"


def dequantize(packed: Tensor, format: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights of packed rows.

    Args:
        packed: uint8, (..., bytes of a row).
        format: one of ``FORMATS``, or "INT8".
        dtype: of the result; the values are float32, and are rounded to it.

    Returns:
        (..., K), the values of ``gguf.dequantize``, bit for bit; of INT8, integers times scale in float32.

    Raises:
        InvalidInputError: an argument is not as above, or the bytes of a row are no whole number of blocks.

    Source: gguf, ``gguf.quants.dequantize``.

    >>> import torch, fusedops
    >>> fusedops.quantization.dequantize(torch.zeros(2, 36, dtype=torch.uint8), "Q4_0").shape
    torch.Size([2, 64])
    """
    _check_format("dequantize", format)
    size = _SCALE_BYTES if format == INT8 else FORMATS[format].bytes
    no_scale = format == INT8 and packed.dim() > 0 and packed.shape[-1] == 0
    if packed.dtype is not torch.uint8 or packed.dim() == 0 or packed.shape[-1] % size or no_scale:
        raise InvalidInputError(
            f"dequantize: got a tensor of {packed.dtype} and shape {tuple(packed.shape)}, expected uint8 with a last "
            f"dim that is a multiple of {size}, the bytes of a block of {format}; to fix: pass what quantize "
            f"returned, or the data of a GGUF tensor, with its format"
        )
    if format == INT8:
        weight, scale = int8_parts(packed)
        return (weight.float() * scale[..., None]).to(dtype)
    sizes = FORMATS[format]
    # a negative view would stay one as float16, and bytes of other strides cannot be viewed as numbers
    blocks = packed.resolve_neg().reshape(packed.numel() // sizes.bytes, sizes.bytes).contiguous()
    columns = packed.shape[-1] // sizes.bytes * sizes.weights
    from fusedops.quantization import _unpack

    return _unpack.UNPACK[format](blocks).to(dtype).view(*packed.shape[:-1], columns)


def quantize_rows(x: Tensor, *, smooth: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round each row to 8 bits, with a scale of its own: ``round(x / scale)``, half to even.

    The scale is ``max(abs(x)) / 127`` in float32, of float64 numbers after they are rounded to float32.

    Args:
        x: (..., K), float16, bfloat16, float32 or float64.
        smooth: (K,), any of the same dtypes: x is divided by it first, in float32. None: by nothing.

    Returns:
        q (..., K), int8 in [-127, 127], and scale (...), float32. A row of zeros, or one whose scale is too small for
        float32, has q 0. One with NaN or inf has q 0 and the scale NaN.

    Raises:
        InvalidInputError: an argument is not as above.

    Source: torch_npu, ``npu_dynamic_quant``; Xiao et al. 2023, arXiv:2211.10438 (``smooth``).

    >>> import torch, fusedops
    >>> fusedops.quantization.quantize_rows(torch.tensor([[1.0, -2.0, 0.5]]))
    (tensor([[  64, -127,   32]], dtype=torch.int8), tensor([0.0157]))
    """
    if not x.is_floating_point() or x.dim() == 0:
        raise InvalidInputError(
            f"quantize_rows: got a tensor of {x.dtype} and shape {tuple(x.shape)}, expected floating numbers (..., K); "
            f"to fix: pass x.float(), with rows in its last dim"
        )
    if smooth is not None and (not smooth.is_floating_point() or smooth.shape != x.shape[-1:]):
        raise InvalidInputError(
            f"quantize_rows: got a smooth of {smooth.dtype} and shape {tuple(smooth.shape)}, expected floating numbers "
            f"of shape {tuple(x.shape[-1:])}; to fix: pass one number for each column of x"
        )
    return rounded_rows(x, None, smooth)


def rounded_rows(x: Tensor, scale: Tensor | None, smooth: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return q and the scale of rows, which is computed where none is given; NaN for a row with NaN or inf.

    >>> import torch
    >>> from fusedops.quantization import rounded_rows
    >>> rounded_rows(torch.tensor([[1.0, -2.0]]), torch.tensor([0.5]), None)
    (tensor([[ 2, -4]], dtype=torch.int8), tensor([0.5000]))
    """
    y = x.detach().float()
    y = y if smooth is None else y / smooth.detach().float()
    largest = y.abs().amax(-1) if y.shape[-1] else y.sum(-1)
    # by a tensor: on a GPU, torch multiplies by the reciprocal of a number
    own = largest / torch.full_like(largest, 127.0) if scale is None else scale.detach().float()
    own = torch.where(largest < math.inf, own, math.nan)
    q = (y / own[..., None]).round().clamp(-127.0, 127.0)
    return q.masked_fill(~(own.abs() > 0)[..., None], 0.0).to(torch.int8), own


def _check_format(name: str, format: str) -> None:
    if format not in LAYER_FORMATS:
        raise InvalidInputError(
            f"{name}: got format = {format!r}, expected one of {', '.join(LAYER_FORMATS)}; to fix: pass one of these"
        )


def _range(format: str) -> tuple[float, float]:
    """Return the smallest and the largest of a weight's largest magnitude, unless it is 0."""
    if format == INT8:  # a scale is a normal number of float32
        return 127 * torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    if format in SCALED:  # what divides the scales is finite
        largest = torch.finfo(torch.float32).max
        return (448.0 * 6.0 / largest if SCALED[format].global_scale else 0.0), largest
    return FORMATS[format].smallest, FORMATS[format].largest


def _other_format(weights: int) -> str:
    """Return the fix for a row whose weights are no whole number of blocks."""
    others = [name for name, sizes in FORMATS.items() if weights % sizes.weights == 0]
    return f"use {', '.join(others)}, or leave the weight as it is" if others else "leave the weight as it is"

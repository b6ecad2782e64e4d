"""quantized_linear with Triton, in the formats of GGUF whose blocks have 32 weights, and those of ``_scaled.py``.

    vector     A program computes the products of one row of x, or of four, with a few rows of the weight. It reads two
               bytes of the weight at a time, and multiplies each weight in float32. For a few rows of x: programs of
               the same part of the weight follow each other, so that its bytes are read from memory once.
    tiles      For many rows of 16-bit x, in formats without a minimum. The integers of a block are exact in 16 bits, so
               tensor cores multiply them with x; the sum over a block, in float32, is multiplied by its scale.
    unpack     The weight in float32, in chunks, for torch's product: of many rows of float32, of formats with a
               minimum, whose weights no 16-bit number has, and of the gradient of x, whose sum is over the scales.

No product is rounded to less than float32, and no sum: torch's product of ``unpack`` is in float32 as long as the
program leaves ``torch.set_float32_matmul_precision`` at "highest".
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from fusedops.dtypes import no_autocast
from fusedops.ops.quantized.quantized_linear import QuantizedLinearArgs, QuantizedLinearGradArgs
from fusedops.quantization import weights_of_row
from fusedops_triton._jit._common import TYPES, read
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div, chains_products
from fusedops_triton.quantized._scaled import Scaled, scaled, store_tile


class _Layout(NamedTuple):
    """The constexprs of a format: what a block has in its bytes. A weight is ``scale * (q - ZERO)``, plus a minimum."""

    BITS: int  # of q in the data, the last bytes of a block: 8, or 4
    ZERO: int
    MINIMUM: bool  # behind the scale
    FIFTH: int  # the offset of the fifth bits of q in bytes; 0: none
    DATA: int  # the offset of the data in bytes
    BYTES: int  # of a block


_LAYOUTS = {
    "Q8_0": _Layout(8, 128, False, 0, 2, 34),  # q is signed; with its highest bit flipped it has a ZERO of 128
    "Q4_0": _Layout(4, 8, False, 0, 2, 18),
    "Q4_1": _Layout(4, 0, True, 0, 4, 20),
    "Q5_0": _Layout(4, 16, False, 2, 6, 22),
    "Q5_1": _Layout(4, 0, True, 4, 8, 24),
}

# None of these settings was measured on a GPU.

#: The most rows of x for ``_vector``, and the rows of a program where there are more than one. Each program unpacks its
#: part of the weight again. Beyond, a tile of 128 rows has few idle ones, and torch's product, which needs the weight
#: written and read as float32, many for each of its bytes.
_FEW_ROWS, _VECTOR_ROWS = 16, 4

#: Rows and words of the weight that a program of ``_vector`` and ``_unpack`` has at a time: 8 words for each of 128
#: threads, whose x is read once for four rows.
_OUTPUTS, _WORDS, _WARPS = 4, 256, 4

#: The rows and outputs of a program of ``_tiles``, and its warps: with 128 outputs, registers spill on sm_90.
_TILE_ROWS, _TILE_OUTPUTS, _TILE_WARPS = 128, 64, 8

#: Weights that are unpacked at a time, 64 MiB in float32: one of 4096 * 4096.
_CHUNK = 2**24

# ---------------------------------------------------------------------------------------------------------- launchers


class Blocks(NamedTuple):
    """A packed weight (outputs, columns) of GGUF, as words of two bytes."""

    words: Tensor
    columns: int
    format: str

    @property
    def outputs(self) -> int:
        """The rows of the weight."""
        return self.words.shape[0]

    def vector(self, y: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """Compute the products of a few rows."""
        _vector_launch(x.shape[0], self.outputs, self.columns, self.format)(y, y, x, self.words, bias)

    def tiles(self, y: Tensor, x: Tensor, bias: Tensor | None) -> bool:
        """Compute the products of many rows of 16 bits, or return False where that is not exact."""
        if x.dtype.itemsize != 2 or _LAYOUTS[self.format].MINIMUM:
            return False
        _tiles_launch(x.shape[0], self.outputs, self.columns, self.format, x.dtype)(y, y, x, self.words, bias)
        return True

    def unpack(self, rows: slice, weight: Tensor) -> None:
        """Write some rows of the weight, contiguous, float32."""
        _unpack_launch(weight.shape[0], self.columns, self.format)(weight, weight, self.words[rows])


def quantized_linear(a: QuantizedLinearArgs) -> Tensor:
    """Compute the op."""
    return linear_forward(a.x, _weight(a), a.bias)


def quantized_linear_backward(a: QuantizedLinearGradArgs) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x, by torch's products with chunks of the weight, and of bias."""
    return linear_backward(a.grad, _weight(a), a.bias, a.needs)


def _weight(a: QuantizedLinearArgs | QuantizedLinearGradArgs) -> Blocks | Scaled:
    assert a.format is not None  # by the op's constraints
    if a.scales is not None:
        return scaled(a.packed, a.format, a.scales, a.global_scale, a.zeros)
    return Blocks(_words(a.packed), weights_of_row(a.packed.shape[1], a.format), a.format)


def linear_forward(x: Tensor, weight: Blocks | Scaled, bias: Tensor | None) -> Tensor:
    """Return the products, (..., N), in the dtype of x."""
    y = x.new_empty((*x.shape[:-1], weight.outputs))
    if not y.numel():
        return y
    if not weight.columns:
        return y.copy_(bias) if bias is not None else y.zero_()
    flat = x.resolve_neg().reshape(-1, weight.columns).contiguous()
    bias = None if bias is None else bias.resolve_neg().contiguous()
    if flat.shape[0] <= _FEW_ROWS:
        weight.vector(y, flat, bias)
    elif not weight.tiles(y, flat, bias):
        wide, sums = flat.float(), y.view(flat.shape[0], weight.outputs)
        with no_autocast(x.device.type):
            for at, part in _chunks(weight):
                product = wide @ part.t() if bias is None else torch.addmm(bias[at].float(), wide, part.t())
                sums[:, at] = product
    return y


def linear_backward(
    grad: Tensor, weight: Blocks | Scaled, bias: Tensor | None, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x, a sum over the chunks, and of bias, each where it is wanted."""
    flat = grad.resolve_neg().reshape(grad.shape[:-1].numel(), grad.shape[-1]).float()
    dx = dbias = None
    if needs[0]:
        total = flat.new_zeros((flat.shape[0], weight.columns))
        if total.numel() and weight.outputs:
            with no_autocast(grad.device.type):
                for at, part in _chunks(weight):
                    total.addmm_(flat[:, at], part)
        dx = total.view(*grad.shape[:-1], weight.columns).to(grad.dtype)
    if needs[1] and bias is not None:
        dbias = flat.sum(0).to(bias.dtype)
    return dx, dbias


def _words(packed: Tensor) -> Tensor:
    """Return packed rows as words of two bytes: each block has an even number of bytes."""
    packed = packed.resolve_neg().contiguous()
    if packed.storage_offset() % 2 or packed.data_ptr() % 2:
        packed = packed.clone()
    return packed.view(torch.int16)


def _chunks(weight: Blocks | Scaled) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of rows of the weight in float32, in one memory."""
    outputs, columns = weight.outputs, weight.columns
    step = max(ceil_div(_CHUNK, columns), 1)
    memory = weight[0].new_empty((min(step, outputs), columns), dtype=torch.float32)
    for start in range(0, outputs, step):
        rows = slice(start, min(start + step, outputs))
        part = memory[: rows.stop - start]
        weight.unpack(rows, part)
        yield rows, part


@cached_by_layout
def _vector_launch(rows: int, outputs: int, columns: int, format: str) -> Launch:
    at_once = 1 if rows == 1 else _VECTOR_ROWS
    even = columns // 32 * _LAYOUTS[format].BITS * 2 % _WORDS == 0 and outputs % _OUTPUTS == 0
    constants = {"EVEN": even, "BM": at_once, "BN": _OUTPUTS, "WORDS": _WORDS, **_LAYOUTS[format]._asdict()}
    down = ceil_div(rows, at_once)
    grid = (down * ceil_div(outputs, _OUTPUTS),)
    return Launch(_vector, grid, (rows, outputs, columns // 32, down), constants, _WARPS)


@cached_by_layout
def _unpack_launch(outputs: int, columns: int, format: str) -> Launch:
    constants = {"BN": _OUTPUTS, "WORDS": _WORDS, **_LAYOUTS[format]._asdict()}
    across = ceil_div(columns // 32 * _LAYOUTS[format].BITS * 2, _WORDS)
    grid = (ceil_div(outputs, _OUTPUTS) * across,)
    return Launch(_unpack, grid, (outputs, columns // 32, across), constants, _WARPS)


@cached_by_layout
def _tiles_launch(rows: int, outputs: int, columns: int, format: str, dtype: torch.dtype) -> Launch:
    across = ceil_div(outputs, _TILE_OUTPUTS)
    constants = {
        # the interpreter has no products of bfloat16; those of float32 are the same
        "OF": TYPES[dtype if isinstance(_tiles, JITFunction) else torch.float32],
        # x of bfloat16 may be as large as a float32: with these integers no sum of a block is larger than x
        "DOWN": 2.0**-12 if dtype is torch.bfloat16 else 1.0,
        "BM": _TILE_ROWS, "BN": _TILE_OUTPUTS, "CHAINED": chains_products(), **_LAYOUTS[format]._asdict(),
    }  # fmt: skip
    grid = (ceil_div(rows, _TILE_ROWS) * across,)
    return Launch(_tiles, grid, (rows, outputs, columns // 32, across), constants, _TILE_WARPS)


# ------------------------------------------------------------------------------------------------------ jit functions


@triton.jit
def _place(index, part, UNIT: tl.constexpr, BITS: tl.constexpr):
    """Return which weight of its block is number ``part`` of unit ``index`` of the data, of UNIT bytes.

    A byte of the data has one weight, or weight i in its low bits and weight 16 + i in its high bits.
    """
    return index * UNIT + part // (8 // BITS) + 16 * (part % (8 // BITS))


@triton.jit
def _integers(
    data, block_ptr, place, inside, part,
    UNIT: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, FIFTH: tl.constexpr,
):  # fmt: skip
    """Return q - ZERO of number ``part`` of the units ``data``, which is weight ``place`` of the block, as float32.

    With the bits of 2**23 above them, bits of an integer are a float32: a conversion takes twice an addition's time.
    """
    q = (data >> (part * BITS)) & (2**BITS - 1)
    if FIFTH:
        bits = _load(block_ptr + FIFTH // UNIT + place // (8 * UNIT), inside).to(tl.int32)
        q |= ((bits >> (place % (8 * UNIT))) & 1) << 4
    if BITS == 8:
        q ^= 128
    return (q | 0x4B000000).to(tl.float32, bitcast=True) - (2.0**23 + ZERO)


@triton.jit
def _load(pointers, inside):
    """Load integers of the weight, 0 where ``inside`` is False. None: all are inside."""
    return tl.load(pointers) if inside is None else tl.load(pointers, inside, 0)


@triton.jit
def _half(pointers, inside):
    """Load float16 numbers of words as float32."""
    return _load(pointers, inside).to(tl.float16, bitcast=True).to(tl.float32)


@profiled(do_not_specialize=["rows", "outputs", "blocks", "down"])
def _vector(
    y_ptr, x_ptr, packed_ptr, bias_ptr, rows, outputs, blocks, down,
    EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    MINIMUM: tl.constexpr, FIFTH: tl.constexpr, DATA: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Compute BM * BN elements. Grid (down * cdiv(outputs, BN),), down = cdiv(rows, BM). blocks: of a row."""
    m = (tl.program_id(0) % down) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) // down) * BN + tl.arange(0, BN)
    row_ptr = x_ptr + m.to(tl.int64)[:, None] * blocks * 32
    weight_ptr = packed_ptr + n.to(tl.int64)[:, None] * blocks * (BYTES // 2)
    total = tl.zeros((BM, BN, WORDS), tl.float32)
    for first in range(0, blocks * (BITS * 2), WORDS):
        word = first + tl.arange(0, WORDS)
        block, index = word // (BITS * 2), word % (BITS * 2)
        fits = (block < blocks)[None, :]
        inside = fits & (n < outputs)[:, None]
        if EVEN:
            inside = None
        block_ptr = weight_ptr + (block * (BYTES // 2))[None, :]
        data = _load(block_ptr + DATA // 2 + index[None, :], inside).to(tl.int32)
        scale, minimum = _half(block_ptr, inside), 0.0
        if MINIMUM:
            minimum = _half(block_ptr + 1, inside)
        for part in tl.static_range(16 // BITS):
            place = _place(index, part, 2, BITS)
            weight = scale * _integers(data, block_ptr, place[None, :], inside, part, 2, BITS, ZERO, FIFTH) + minimum
            x = read(row_ptr + (block.to(tl.int64) * 32 + place)[None, :], fits & (m < rows)[:, None])
            total += weight[None, :, :] * x[:, None, :]
    store_tile(y_ptr, tl.sum(total, 2), bias_ptr, m, n, rows, outputs)


@profiled(do_not_specialize=["outputs", "blocks", "across"])
def _unpack(
    weight_ptr, packed_ptr, outputs, blocks, across,
    BN: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, MINIMUM: tl.constexpr,
    FIFTH: tl.constexpr, DATA: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Write the weights of BN * WORDS words. Grid (cdiv(outputs, BN) * across,), across = cdiv(words, WORDS)."""
    n = (tl.program_id(0) // across) * BN + tl.arange(0, BN)
    word = (tl.program_id(0) % across) * WORDS + tl.arange(0, WORDS)
    block, index = word // (BITS * 2), word % (BITS * 2)
    inside = (block < blocks)[None, :] & (n < outputs)[:, None]
    row = n.to(tl.int64)[:, None] * blocks
    block_ptr = packed_ptr + row * (BYTES // 2) + (block * (BYTES // 2))[None, :]
    data = _load(block_ptr + DATA // 2 + index[None, :], inside).to(tl.int32)
    scale, minimum = _half(block_ptr, inside), 0.0
    if MINIMUM:
        minimum = _half(block_ptr + 1, inside)
    for part in tl.static_range(16 // BITS):
        place = _place(index, part, 2, BITS)
        weight = scale * _integers(data, block_ptr, place[None, :], inside, part, 2, BITS, ZERO, FIFTH) + minimum
        tl.store(weight_ptr + row * 32 + (block.to(tl.int64) * 32 + place)[None, :], weight, inside)


@profiled(do_not_specialize=["rows", "outputs", "blocks", "across"])
def _tiles(
    y_ptr, x_ptr, packed_ptr, bias_ptr, rows, outputs, blocks, across,
    OF: tl.constexpr, DOWN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHAINED: tl.constexpr,
    BITS: tl.constexpr, ZERO: tl.constexpr, MINIMUM: tl.constexpr, FIFTH: tl.constexpr, DATA: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """Compute BM * BN elements, in a format without a MINIMUM. Grid (cdiv(rows, BM) * across,).

    CHAINED: the products of a block are added to one another, else each to the sum of the row.

    The data of a block is read while the one before is multiplied: Triton does not, of less than four bytes at a time.
    """
    tl.static_assert(not MINIMUM)
    m = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    index = tl.arange(0, BITS * 4)
    row_ptr = x_ptr + m.to(tl.int64)[:, None] * blocks * 32
    scale_ptr = packed_ptr + n.to(tl.int64) * blocks * (BYTES // 2)
    inside = (n < outputs)[None, :] & (index >= 0)[:, None]
    following = tl.load(_bytes(scale_ptr) + (DATA + index)[:, None], inside, 0)
    total = tl.zeros((BM, BN), tl.float32)
    for block in range(blocks):
        data, block_ptr = following.to(tl.int32), _bytes(scale_ptr)
        more = tl.full((BITS * 4,), block + 1, tl.int32) < blocks
        following = tl.load(block_ptr + (BYTES + DATA + index)[:, None], inside & more[:, None], 0)
        scale = _half(scale_ptr, n < outputs) / DOWN
        sums = tl.zeros((BM, BN), tl.float32)
        for part in tl.static_range(8 // BITS):
            place = _place(index, part, 1, BITS)
            q = _integers(data, block_ptr, place[:, None], inside, part, 1, BITS, ZERO, FIFTH)
            q = (q * DOWN).to(OF)  # exact: 8 bits
            x = tl.load(row_ptr + place[None, :], (m < rows)[:, None] & (place >= 0)[None, :], 0.0)
            if CHAINED:
                sums = tl.dot(x.to(OF), q, sums, input_precision="ieee", out_dtype=tl.float32)
            else:
                total += tl.dot(x.to(OF), q, input_precision="ieee", out_dtype=tl.float32) * scale[None, :]
        if CHAINED:
            total += sums * scale[None, :]
        row_ptr += 32
        scale_ptr += BYTES // 2
    store_tile(y_ptr, total, bias_ptr, m, n, rows, outputs)


@triton.jit
def _bytes(word_ptr):
    """Return pointers (N,) to words as pointers to bytes, (1, N)."""
    return word_ptr.to(tl.pointer_type(tl.uint8))[None, :]

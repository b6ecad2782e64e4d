"""Weights whose scales are a tensor of their own, in Triton: the same three kernels as of GGUF in ``_quantized.py``.

A weight is ``(number of its code - centre) * scale``, rounded to float32 once, with the centre of its group where it
has zeros. Codes are read as words of 32 bits, rows of float8 of no whole words as bytes. The scales are read as they
are stored, E8M0 and e4m3 by their bits: a conversion of float8 needs sm_89.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from fusedops.quantization import SCALED, weights_of_row
from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import TYPES, read
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div

# None of these settings was measured on a GPU.

#: As of ``_quantized.py``: rows of x that a program has where there are more than one; rows and words of the weight;
#: the rows and outputs of a tile. A step of a tile has at most so many columns of one group.
_VECTOR_ROWS, _OUTPUTS, _WORDS, _WARPS = 4, 4, 128, 4
_TILE_ROWS, _TILE_OUTPUTS, _TILE_COLUMNS, _TILE_WARPS = 128, 64, 64, 8

#: The largest number of a code, rounded up to a power of two; None: of no 16 bits, as those of NF4.
LARGEST = {"e2m1": 8, "int4": 16, "e4m3": 512, "table": None}


class Layout(NamedTuple):
    """The constexprs of a weight."""

    BITS: int  # of a code
    HIGH: bool  # the high half of a byte is the first of its codes
    KIND: str  # of the numbers
    SCALE: str  # of the scales: "float", "e8m0" or "e4m3"
    GROUP: int  # the columns of a scale; 0: all
    ROWS: int  # the rows of a scale; 0: all


class Scaled(NamedTuple):
    """A packed weight (outputs, columns), whose tensors are contiguous."""

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None
    zeros: Tensor | None
    columns: int
    layout: Layout

    @property
    def outputs(self) -> int:
        """The rows of the weight."""
        return self.codes.shape[0]

    @property
    def groups(self) -> int:
        """The scales of a row."""
        return self.scales.shape[-1]

    def vector(self, y: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """Compute the products of a few rows."""
        words = self._words()
        launch = _vector_launch(x.shape[0], self.outputs, words.shape[1], self.groups, words.dtype, self.layout)
        launch(y, y, x, words, *self.parts(), bias)

    def tiles(self, y: Tensor, x: Tensor, bias: Tensor | None) -> bool:
        """Compute the products of many rows of 16 bits, or return False where that is not exact."""
        step = _columns_of_step(self.layout, self.columns)
        if x.dtype.itemsize != 2 or not step:
            return False
        sizes = (x.shape[0], self.outputs, self.columns, self.groups)
        launch = _tiles_launch(*sizes, step, x.dtype, self.layout)
        launch(y, y, x, self.codes, self.scales, self.global_scale, self.zeros, bias)
        return True

    def unpack(self, rows: slice, weight: Tensor) -> None:
        """Write some rows of the weight, contiguous, float32."""
        one = self.layout.ROWS
        if one > 1 and rows.start % one:  # a part that begins in the middle of a block has the scales of each row
            index = torch.arange(rows.start, rows.start + weight.shape[0], device=self.codes.device) // one
            part = self._replace(scales=self.scales[index], layout=self.layout._replace(ROWS=1))
        else:
            of_scales = slice(rows.start // one, None) if one else slice(None)
            part = self._replace(scales=self.scales[of_scales])
        part = part._replace(codes=self.codes[rows], zeros=None if self.zeros is None else self.zeros[rows])
        words = part._words()
        launch = _unpack_launch(weight.shape[0], words.shape[1], part.groups, words.dtype, part.layout)
        launch(weight, weight, words, *part.parts())

    def _words(self) -> Tensor:
        """Return the codes as words of 32 bits, or as bytes where a row has no whole number of them."""
        if self.codes.shape[1] % 4:
            return self.codes
        codes = self.codes
        if codes.storage_offset() % 4 or codes.data_ptr() % 4:
            codes = codes.clone()
        return codes.view(torch.int32)

    def parts(self) -> tuple[Tensor | None, ...]:
        """Return what the kernels read beside the codes."""
        table = table_of(self.codes.device) if self.layout.KIND == "table" else None
        return self.scales, self.global_scale, self.zeros, table


def scaled(codes: Tensor, format: str, scales: Tensor, global_scale: Tensor | None, zeros: Tensor | None) -> Scaled:
    """Return a weight of the arguments of the op."""
    data, columns = SCALED[format], weights_of_row(codes.shape[-1], format)
    size = data.group or columns // max(scales.shape[-1], 1)
    kind = "e4m3" if data.values is None else _KINDS.get(format, "e2m1")
    of_scales = "float" if scales.dtype is not torch.uint8 else "e4m3" if data.e4m3 else "e8m0"
    layout = Layout(data.bits, data.high_first, kind, of_scales, 0 if scales.shape[-1] == 1 else size, data.rows)
    plain = (None if each is None else each.resolve_neg().contiguous() for each in (codes, zeros, scales))
    codes, zeros, scales = plain  # pyright: ignore[reportAssignmentType]
    return Scaled(codes, scales, None if global_scale is None else global_scale.float(), zeros, columns, layout)


_KINDS = {"INT4_GROUP": "int4", "NF4": "table"}


@cache
def table_of(device: torch.device) -> Tensor:
    return torch.tensor(SCALED["NF4"].values, device=device)


def _columns_of_step(layout: Layout, columns: int) -> int:
    """Return how many columns of one group a step of a tile has; 0: there are no tiles of these."""
    group = layout.GROUP or _TILE_COLUMNS
    step = min(group & -group, _TILE_COLUMNS)
    return step if step >= 16 and LARGEST[layout.KIND] is not None and columns else 0


def _per_word(dtype: torch.dtype, layout: Layout) -> int:
    return dtype.itemsize * 8 // layout.BITS


@cached_by_layout
def _vector_launch(rows: int, outputs: int, words: int, groups: int, dtype: torch.dtype, layout: Layout) -> Launch:
    at_once = 1 if rows == 1 else _VECTOR_ROWS
    down = ceil_div(rows, at_once)
    constants = {"BM": at_once, "BN": _OUTPUTS, "WORDS": _WORDS, "PER": _per_word(dtype, layout), **layout._asdict()}
    grid = (down * ceil_div(outputs, _OUTPUTS),)
    return Launch(_vector, grid, (rows, outputs, words, groups, down), constants, _WARPS)


@cached_by_layout
def _unpack_launch(outputs: int, words: int, groups: int, dtype: torch.dtype, layout: Layout) -> Launch:
    across = ceil_div(words, _WORDS)
    constants = {"BN": _OUTPUTS, "WORDS": _WORDS, "PER": _per_word(dtype, layout), **layout._asdict()}
    return Launch(_unpack, (ceil_div(outputs, _OUTPUTS) * across,), (outputs, words, groups, across), constants, _WARPS)


@cached_by_layout
def _tiles_launch(
    rows: int, outputs: int, columns: int, groups: int, step: int, dtype: torch.dtype, layout: Layout
) -> Launch:
    across = ceil_div(outputs, _TILE_OUTPUTS)
    largest = step * (LARGEST[layout.KIND] or 1)
    constants = {
        # the interpreter has no products of bfloat16; those of float32 are the same
        "OF": TYPES[dtype if isinstance(_tiles, JITFunction) else torch.float32],
        # x of bfloat16 may be as large as a float32: with these numbers no sum of a step is larger than x
        "DOWN": 1.0 / largest if dtype is torch.bfloat16 else 1.0,
        "EVEN": columns % step == 0, "UNIT": unit(columns),
        "BM": _TILE_ROWS, "BN": _TILE_OUTPUTS, "BK": step, **layout._asdict(),
    }  # fmt: skip
    grid = (ceil_div(rows, _TILE_ROWS) * across,)
    return Launch(_tiles, grid, (rows, outputs, columns // unit(columns), groups, across), constants, _TILE_WARPS)


# ------------------------------------------------------------------------------------------------------ jit functions


@triton.jit
def _small(code, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr):
    """Return the numbers of few bits, a sign, an exponent and a mantissa, as float32: by a float16 of the same bits.

    A float16 has subnormal numbers on each chip, and no number of e2m1 or e4m3 is one of float32.
    """
    sign: tl.constexpr = 2 ** (MANTISSA + EXPONENT)
    half = ((code & (sign - 1)) << (10 - MANTISSA)) | ((code & sign) << (15 - MANTISSA - EXPONENT))
    power: tl.constexpr = 2.0 ** (16 - 2 ** (EXPONENT - 1))
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * power


@triton.jit
def e4m3(code):
    return tl.where((code & 0x7F) == 0x7F, float("nan"), _small(code, 3, 4))


@triton.jit
def _numbers(code, table_ptr, KIND: tl.constexpr):
    """Return the numbers of codes, int32, as float32."""
    if KIND == "e4m3":
        number = e4m3(code)
    elif KIND == "e2m1":
        number = _small(code, 1, 2)
    elif KIND == "int4":  # as in ``_quantized.py``: bits above those of 2**23
        number = (code | 0x4B000000).to(tl.float32, bitcast=True) - (2.0**23 + 8)
    else:
        number = tl.load(table_ptr + code)
    return number


@triton.jit
def read_scales(scale_ptr, global_ptr, at, inside, SCALE: tl.constexpr):
    """Return scales as float32, divided by the global one."""
    if SCALE == "e8m0":
        power = tl.load(scale_ptr + at, inside, 127).to(tl.int32)
        bits = tl.where(power == 0, 0x00400000, tl.where(power == 255, 0x7FC00000, power << 23))
        scale = bits.to(tl.float32, bitcast=True)
    elif SCALE == "e4m3":
        scale = e4m3(tl.load(scale_ptr + at, inside, 0).to(tl.int32))
    else:
        scale = read(scale_ptr + at, inside)
    if global_ptr is not None:
        scale = tl.div_rn(scale, tl.load(global_ptr) + tl.zeros_like(scale))
    return scale


@triton.jit
def first_scale(n, groups, ROWS: tl.constexpr):
    """Return the offset of the first scale of rows n, 64-bit."""
    if ROWS == 0:
        return n.to(tl.int64) * 0
    return (n // ROWS).to(tl.int64) * groups


@triton.jit
def _weights(
    data, scale, zeros_ptr, table_ptr, at, inside, part: tl.constexpr,
    BITS: tl.constexpr, HIGH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Return the weights of number ``part`` of the words ``data``, whose group is ``at``."""
    place: tl.constexpr = part + 1 - 2 * (part % 2) if HIGH else part
    number = _numbers((data >> (place * BITS)) & (2**BITS - 1), table_ptr, KIND)
    if zeros_ptr is not None:
        number -= tl.load(zeros_ptr + at, inside, 8).to(tl.float32) - 8
    return number * scale


@triton.jit
def read_tile(
    pointers, of_codes, zeros_ptr, table_ptr, at, fits,
    BN: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Return BK numbers of each of BN rows, less their centre, without the scales, as float32.

    Args:
        pointers: to the bytes of the codes.
        of_codes: False for bytes that are not read.
        zeros_ptr: to the first zero of the weight, or None.
        table_ptr: to the numbers of NF4, or None.
        at: (BN,), the one group of each row.
        fits: (BN,), False for rows that are not read.
    """
    data = tl.load(pointers, of_codes, 0).to(tl.int32)
    if BITS == 4:
        data = tl.reshape(tl.join(data >> 4, data & 15) if HIGH else tl.join(data & 15, data >> 4), (BN, BK))
    number = _numbers(data, table_ptr, KIND)
    if zeros_ptr is not None:
        number -= (tl.load(zeros_ptr + at, fits, 8).to(tl.float32) - 8)[:, None]
    return number


@profiled(do_not_specialize=["rows", "outputs", "words", "groups", "down"])
def _vector(
    y_ptr, x_ptr, codes_ptr, scale_ptr, global_ptr, zeros_ptr, table_ptr, bias_ptr, rows, outputs, words, groups, down,
    BM: tl.constexpr, BN: tl.constexpr, WORDS: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr,
    HIGH: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute BM * BN elements. Grid (down * cdiv(outputs, BN),), down = cdiv(rows, BM). words: of a row, each of PER
    codes, all of one group.
    """
    m = (tl.program_id(0) % down) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) // down) * BN + tl.arange(0, BN)
    row_ptr = x_ptr + m.to(tl.int64)[:, None] * words * PER
    of_codes_ptr = codes_ptr + n.to(tl.int64)[:, None] * words
    total = tl.zeros((BM, BN, WORDS), tl.float32)
    for first in range(0, words, WORDS):
        word = first + tl.arange(0, WORDS)
        fits = (word < words)[None, :]
        inside = fits & (n < outputs)[:, None]
        data = tl.load(of_codes_ptr + word[None, :], inside, 0).to(tl.int32)
        at = first_scale(n, groups, ROWS)[:, None] + (word // (GROUP // PER) if GROUP else word * 0)[None, :]
        scale = read_scales(scale_ptr, global_ptr, at, inside, SCALE)
        for part in tl.static_range(PER):
            weight = _weights(data, scale, zeros_ptr, table_ptr, at, inside, part, BITS, HIGH, KIND)
            x = read(row_ptr + (word.to(tl.int64) * PER + part)[None, :], fits & (m < rows)[:, None])
            total += weight[None, :, :] * x[:, None, :]
    store_tile(y_ptr, tl.sum(total, 2), bias_ptr, m, n, rows, outputs)


@profiled(do_not_specialize=["outputs", "words", "groups", "across"])
def _unpack(
    weight_ptr, codes_ptr, scale_ptr, global_ptr, zeros_ptr, table_ptr, outputs, words, groups, across,
    BN: tl.constexpr, WORDS: tl.constexpr, PER: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr,
    KIND: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the weights of BN * WORDS words. Grid (cdiv(outputs, BN) * across,), across = cdiv(words, WORDS)."""
    n = (tl.program_id(0) // across) * BN + tl.arange(0, BN)
    word = (tl.program_id(0) % across) * WORDS + tl.arange(0, WORDS)
    inside = (word < words)[None, :] & (n < outputs)[:, None]
    place = n.to(tl.int64)[:, None] * words + word[None, :]
    data = tl.load(codes_ptr + place, inside, 0).to(tl.int32)
    at = first_scale(n, groups, ROWS)[:, None] + (word // (GROUP // PER) if GROUP else word * 0)[None, :]
    scale = read_scales(scale_ptr, global_ptr, at, inside, SCALE)
    for part in tl.static_range(PER):
        weight = _weights(data, scale, zeros_ptr, table_ptr, at, inside, part, BITS, HIGH, KIND)
        tl.store(weight_ptr + place * PER + part, weight, inside)


@profiled(do_not_specialize=["rows", "outputs", "units", "groups", "across"])
def _tiles(
    y_ptr, x_ptr, codes_ptr, scale_ptr, global_ptr, zeros_ptr, bias_ptr, rows, outputs, units, groups, across,
    OF: tl.constexpr, DOWN: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute BM * BN elements, BK columns of a group at a time, of units * UNIT. Grid (cdiv(rows, BM) * across,).

    EVEN: BK divides them.
    """
    m = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    PER: tl.constexpr = 8 // BITS
    columns, bytes = units * UNIT, units * (UNIT // PER)
    row_ptr = x_ptr + m.to(tl.int64)[:, None] * columns
    of_codes_ptr = codes_ptr + n.to(tl.int64)[:, None] * bytes
    of_scales, fits = first_scale(n, groups, ROWS), n < outputs
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, columns, BK):
        byte, k = first // PER + tl.arange(0, BK // PER), first + tl.arange(0, BK)
        of_codes, of_x = fits[:, None] & (byte >= 0)[None, :], (m < rows)[:, None] & (k >= 0)[None, :]
        if not EVEN:
            of_codes, of_x = fits[:, None] & (byte < bytes)[None, :], (m < rows)[:, None] & (k < columns)[None, :]
        at = of_scales + (first // GROUP if GROUP else 0)
        number = read_tile(of_codes_ptr + byte[None, :], of_codes, zeros_ptr, None, at, fits, BN, BK, BITS, HIGH, KIND)
        x = tl.load(row_ptr + k[None, :], of_x, 0.0)
        number = tl.trans((number * DOWN).to(OF))  # exact
        sums = tl.dot(x.to(OF), number, input_precision="ieee", out_dtype=tl.float32)
        total += sums * read_scales(scale_ptr, global_ptr, at, fits, SCALE)[None, :]
    store_tile(y_ptr, total / DOWN, bias_ptr, m, n, rows, outputs)


@triton.jit
def store_tile(y_ptr, sums, bias_ptr, m, n, rows, outputs):
    """Write sums (rows m, columns n), with the bias."""
    if bias_ptr is not None:
        sums += read(bias_ptr + n, n < outputs)[None, :]
    at = m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(y_ptr + at, rounded(sums, y_ptr), (m < rows)[:, None] & (n < outputs)[None, :])

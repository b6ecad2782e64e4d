"""The products of the rows of each expert with its packed weight, in one launch for all experts.

    rows        A program computes a tile of the output of one expert, some columns of one group at a time: the numbers
                of the codes are multiplied, and each sum by its scale.
    gradient    A program computes a tile of the gradients of the rows, over the outputs, whose weights it unpacks.

Numbers of codes are exact in 16 bits but for those of NF4. All else is in float32, without TF32: also products of
gradients, since a number times its scale is exact in no 16 bits. An expert without rows is not read. The size of a tile
does not depend on the number of rows, so that a row's bits do not.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import TYPES, read
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.experts._grouped import expert_of_tile
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div
from fusedops_triton.quantized._scaled import LARGEST, Layout, Scaled, first_scale, read_scales, read_tile

# None of these settings was measured on a GPU.

#: The rows of a tile and its warps; its columns, at most, and the terms of a step, of products of 16 bits and of
#: float32, which has no tensor cores: a thread has larger ones in its registers.
_ROWS, _WARPS = 64, 4
_NARROW, _WIDE = (64, 64), (32, 16)


# ---------------------------------------------------------------------------------------------------------- launchers


class PackedRows(NamedTuple):
    """A packed weight of all experts, by its products with rows."""

    weight: Scaled

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the unpacked weight, (E, N, K)."""
        experts, outputs, _ = self.weight.codes.shape
        return experts, outputs, self.weight.columns

    def products(self, rows: Tensor, ends: Tensor, swapped: bool) -> Tensor:
        """Return the product of each row with the weight of its expert, in the dtype of rows.

        Args:
            rows: (S, K), contiguous, sorted by expert; without ``swapped`` (S, N).
            ends: (E,), int32. What is past the last one is not written.
            swapped: of a weight (E, N, K); else of (E, K, N), for the gradient of rows.
        """
        experts, outputs, columns = self.shape
        y = rows.new_empty((rows.shape[0], outputs if swapped else columns))
        if not outputs or not columns:
            return y.zero_()
        if y.numel() and experts:
            make = _rows_launch if swapped else _gradient_launch
            launch = make(rows.shape[0], *self.shape, *self.weight.scales.shape[1:], rows.dtype, self.weight.layout)
            launch(y, y, rows, self.weight.codes, *self.weight.parts(), ends)
        return y


def _step(layout: Layout, most: int) -> int:
    """Return how many columns of one group a tile has."""
    group = layout.GROUP or most
    return min(group & -group, most)


@cached_by_layout
def _rows_launch(
    n_rows: int, experts: int, outputs: int, columns: int, lines: int, groups: int, dtype: torch.dtype, layout: Layout
) -> Launch:
    narrow = dtype.itemsize == 2 and LARGEST[layout.KIND] is not None
    tile, most = _NARROW if narrow else _WIDE
    step = _step(layout, most)
    largest = step * (LARGEST[layout.KIND] or 1)
    constants = {
        # the interpreter has no products of bfloat16; those of float32 are the same
        "OF": TYPES[dtype if narrow and isinstance(_rows, JITFunction) else torch.float32],
        # rows may be as large as a float32: with these numbers no sum of a step is larger
        "DOWN": 1.0 if dtype is torch.float16 else 1.0 / largest,
        "EVEN": columns % step == 0, "UNIT": unit(columns), "STEPS": (experts - 1).bit_length(),
        "BM": _ROWS, "BN": tile, "BK": step, **layout._asdict(),
    }  # fmt: skip
    across = ceil_div(outputs, tile)
    sizes = (experts, outputs, columns // unit(columns), lines, groups, across)
    return Launch(_rows, ((n_rows // _ROWS + experts) * across,), sizes, constants, _WARPS)


@cached_by_layout
def _gradient_launch(
    n_rows: int, experts: int, outputs: int, columns: int, lines: int, groups: int, dtype: torch.dtype, layout: Layout
) -> Launch:
    step = _step(layout, _WIDE[0])
    constants = {
        "UNIT": unit(columns), "STEPS": (experts - 1).bit_length(), "BM": _ROWS, "BN": _WIDE[1], "BK": step,
        **layout._asdict(),
    }  # fmt: skip
    across = ceil_div(columns, step)
    sizes = (experts, outputs, columns // unit(columns), lines, groups, across)
    return Launch(_gradient, ((n_rows // _ROWS + experts) * across,), sizes, constants, _WARPS)


# ------------------------------------------------------------------------------------------------------ jit functions


@profiled(do_not_specialize=["experts", "outputs", "units", "lines", "groups", "across"])
def _rows(
    y_ptr, rows_ptr, codes_ptr, scale_ptr, global_ptr, zeros_ptr, table_ptr, ends_ptr,
    experts, outputs, units, lines, groups, across,
    OF: tl.constexpr, DOWN: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr, STEPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr, KIND: tl.constexpr,
    SCALE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute BM * BN elements. Grid (tiles * across,), with as many tiles as there may be; the last ones are empty.

    lines, groups: the rows and columns of the scales of an expert. EVEN: BK divides the columns, units * UNIT.
    """
    PER: tl.constexpr = 8 // BITS
    columns, bytes = units * UNIT, units * UNIT // PER
    tile, n = tl.program_id(0) // across, (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    expert, first_row = expert_of_tile(ends_ptr, tile, experts, STEPS, BM)
    end = tl.load(ends_ptr + expert)
    if first_row < end:
        m, fits = first_row + tl.arange(0, BM), n < outputs
        row_ptr = rows_ptr + m.to(tl.int64)[:, None] * columns
        of_codes_ptr = codes_ptr + (expert.to(tl.int64) * outputs + n.to(tl.int64))[:, None] * bytes
        of_scales = expert.to(tl.int64) * lines * groups + first_scale(n, groups, ROWS)
        if global_ptr is not None:
            global_ptr += expert
        total = tl.zeros((BM, BN), tl.float32)
        for first in range(0, columns, BK):
            byte, k = first // PER + tl.arange(0, BK // PER), first + tl.arange(0, BK)
            of_codes, of_rows = fits[:, None] & (byte >= 0)[None, :], (m < end)[:, None] & (k >= 0)[None, :]
            if not EVEN:
                of_codes, of_rows = fits[:, None] & (byte < bytes)[None, :], (m < end)[:, None] & (k < columns)[None, :]
            at = of_scales + (first // GROUP if GROUP else 0)
            number = read_tile(
                of_codes_ptr + byte[None, :], of_codes, zeros_ptr, table_ptr, at, fits, BN, BK, BITS, HIGH, KIND
            )
            rows = tl.load(row_ptr + k[None, :], of_rows, 0.0)
            number = tl.trans((number * DOWN).to(OF))  # exact
            sums = tl.dot(rows.to(OF), number, input_precision="ieee", out_dtype=tl.float32)
            total += sums * read_scales(scale_ptr, global_ptr, at, fits, SCALE)[None, :]
        to = m.to(tl.int64)[:, None] * outputs + n[None, :]
        tl.store(y_ptr + to, rounded(total / DOWN, y_ptr), (m < end)[:, None] & fits[None, :])


@profiled(do_not_specialize=["experts", "outputs", "units", "lines", "groups", "across"])
def _gradient(
    y_ptr, rows_ptr, codes_ptr, scale_ptr, global_ptr, zeros_ptr, table_ptr, ends_ptr,
    experts, outputs, units, lines, groups, across,
    UNIT: tl.constexpr, STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr,
    HIGH: tl.constexpr, KIND: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute BM * BK elements, BN outputs at a time. Grid and sizes as of ``_rows``."""
    PER: tl.constexpr = 8 // BITS
    columns, bytes = units * UNIT, units * UNIT // PER
    tile, first = tl.program_id(0) // across, (tl.program_id(0) % across) * BK
    expert, first_row = expert_of_tile(ends_ptr, tile, experts, STEPS, BM)
    end = tl.load(ends_ptr + expert)
    if first_row < end:
        m, k = first_row + tl.arange(0, BM), first + tl.arange(0, BK)
        byte = first // PER + tl.arange(0, BK // PER)
        row_ptr = rows_ptr + m.to(tl.int64)[:, None] * outputs
        of_expert = expert.to(tl.int64)
        if global_ptr is not None:
            global_ptr += expert
        total = tl.zeros((BM, BK), tl.float32)
        for output in range(0, outputs, BN):
            n = output + tl.arange(0, BN)
            fits = n < outputs
            at = of_expert * lines * groups + first_scale(n, groups, ROWS) + (first // GROUP if GROUP else 0)
            pointers = codes_ptr + (of_expert * outputs + n.to(tl.int64))[:, None] * bytes + byte[None, :]
            of_codes = fits[:, None] & (byte < bytes)[None, :]
            number = read_tile(pointers, of_codes, zeros_ptr, table_ptr, at, fits, BN, BK, BITS, HIGH, KIND)
            weight = number * read_scales(scale_ptr, global_ptr, at, fits, SCALE)[:, None]
            rows = read(row_ptr + n[None, :], (m < end)[:, None] & fits[None, :])
            total = tl.dot(rows, weight, total, input_precision="ieee", out_dtype=tl.float32)
        to = m.to(tl.int64)[:, None] * columns + k[None, :]
        tl.store(y_ptr + to, rounded(total, y_ptr), (m < end)[:, None] & (k < columns)[None, :])

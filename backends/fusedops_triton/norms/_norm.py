"""RMSNorm and LayerNorm in Triton, with and without a residual: the forward. ``_norm_backward.py`` has the backward.

Kernels see a tensor as (n_rows, H). One kernel computes all four ops: CENTER subtracts the mean of a row, and a pointer
that is None leaves out the residual, the weight, the bias or the saved values.

    rows on chip    A program loads whole rows, once: it moves the fewest bytes. A program of one warp holds several
                    short rows, so that no row waits for a barrier.
    longer rows     A program reads its row twice, in blocks: first for the mean and the mean square (Welford 1962, for
                    each lane), then to write the result.

Common to all kernels:

- Rows are normalized in float32. The sum ``x + residual`` is rounded to its dtype, and the
  rounded values are normalized.
- Tensors of x's size are made contiguous if they are not. H is passed as ``size * UNIT``, so that rows of a length that
  is divisible by 8 but not by 16 have 16-byte accesses.
- Offsets of rows are 64-bit.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.dtypes import promoted
from fusedops.ops.norms.arguments import AddLayerNormArgs, AddRmsNormArgs
from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import read, read_evicting, scalar, widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div
from fusedops_triton.norms._norm_settings import norm_plan

# ----------------------------------------------------------------------------------------------------------- launcher


def add_layer_norm(a: AddLayerNormArgs, save: bool) -> tuple[Tensor | None, ...]:
    """Compute the op for any rank, row length, strides and dtypes."""
    return norm_forward(a.x, a.residual, a.weight, a.bias, a.eps, 0.0, True, save)


def add_rms_norm(a: AddRmsNormArgs, save: bool) -> tuple[Tensor | None, ...]:
    """Compute the op for any rank, row length, strides and dtypes."""
    y, s, _, rstd = norm_forward(a.x, a.residual, a.weight, None, a.eps, a.offset, False, save)
    return y, s, rstd


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the op for any rank, row length, strides and dtypes."""
    y, _, mean, rstd = norm_forward(x, None, weight, bias, eps, 0.0, True, save)
    return y, mean, rstd


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the op for any rank, row length, strides and dtypes."""
    y, _, _, rstd = norm_forward(x, None, weight, None, eps, offset, False, save)
    return y, rstd


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    centered: bool,
    save: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute ``y = norm(s) * (offset + weight) + bias`` with ``s = x + residual``.

    Args:
        x: (..., H), float16, bfloat16 or float32, any strides.
        residual: (..., H), any of these dtypes, any strides; or None: s is x then.
        weight: (H,), any of these dtypes; or None.
        bias: (H,), any of these dtypes; or None.
        eps: at least 0.
        offset: finite.
        centered: True for LayerNorm, False for RMSNorm.
        save: True also returns the saved values.

    Returns:
        y (..., H), the dtype of x; s (..., H), the dtype of x + residual, None without a residual; mean (...) if
        ``centered``, and rstd (...), each None if not asked for. All are contiguous.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    dtype = promoted(x, residual)
    s = None if residual is None else torch.empty_like(y, dtype=dtype)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if save else None
    mean = torch.empty_like(rstd) if rstd is not None and centered else None
    if y.numel() == 0:
        for value in (mean, rstd):  # of rows without columns
            if value is not None:
                value.fill_(float("nan"))
        return y, s, mean, rstd
    launch = _forward_launch(
        x.numel() // x.shape[-1], x.shape[-1], residual is not None, dtype, centered, offset != 0.0
    )
    launch(
        y, y, s, mean, rstd, ready(x), ready(residual), ready(weight), ready(bias),
        float(eps), float(offset),
    )  # fmt: skip
    return y, s, mean, rstd


def ready(tensor: Tensor | None) -> Tensor | None:
    """Return a contiguous tensor of the same values without the negative bit."""
    return None if tensor is None else tensor.resolve_neg().contiguous()


@cached_by_layout
def _forward_launch(n_rows: int, size: int, adds: bool, dtype: torch.dtype, centered: bool, shifts: bool) -> Launch:
    """Return the launch for (n_rows, size). dtype: of the rows that are normalized. shifts: there is an offset."""
    unit_h = unit(size)
    setting = norm_plan(size, dtype.itemsize, 2 if adds else 1)
    sizes = (n_rows, size // unit_h)
    constants = {"CENTER": centered, "UNIT": unit_h, "BLOCK": setting.block}
    if not setting.on_chip:
        return Launch(_norm_forward_long, (n_rows,), sizes, constants, setting.warps)
    even = size == setting.block and n_rows % setting.rows == 0
    constants |= {"OFFSET": shifts, "EVEN": even, "ROWS": setting.rows}
    grid = (ceil_div(n_rows, setting.rows),)
    return Launch(_norm_forward_on_chip, grid, sizes, constants, setting.warps, setting.registers)


# ------------------------------------------------------------------------------------------------------------ kernels
# Triton does not specialise on sizes: UNIT gives the compiler the alignment.

_NOT_SPECIALIZED = ["eps", "offset", "n_rows", "size"]


@profiled(do_not_specialize=_NOT_SPECIALIZED)
def _norm_forward_on_chip(
    y_ptr, s_ptr, mean_ptr, rstd_ptr, x_ptr, residual_ptr, weight_ptr, bias_ptr, eps, offset, n_rows, size,
    CENTER: tl.constexpr, OFFSET: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ROWS whole rows. Grid (cdiv(n_rows, ROWS),); H = size * UNIT <= BLOCK.

    y_ptr, x_ptr: (n_rows, H). s_ptr, residual_ptr: (n_rows, H), or both None. mean_ptr, rstd_ptr: (n_rows,), or None.
    weight_ptr, bias_ptr: (H,), or None. eps, offset: see ``scalar``. OFFSET: False: offset is 0.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    in_row, width = columns_of(col, size, UNIT, EVEN, BLOCK)
    inside = in_row[None, :]
    if ROWS > 1 and not EVEN:  # else the grid has no program without a row
        inside = inside & (row < n_rows)[:, None]
    at = row[:, None] * width + col[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if residual_ptr is None:
        s = widened(x)
    else:  # by Triton's conversion, with which the compiler adds two bfloat16 by half an instruction
        total = rounded(x.to(tl.float32) + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32), s_ptr)
        tl.store(s_ptr + at, total, mask=inside)
        s = widened(total)

    if CENTER:
        mean = tl.sum(s, axis=1) / width.to(tl.float32)
        s = tl.where(inside, s - mean[:, None], 0.0)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, mask=row < n_rows)
    rstd = tl.rsqrt(tl.sum(s * s, axis=1) / width.to(tl.float32) + scalar(eps))
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=row < n_rows)
    y = s * rstd[:, None]
    if weight_ptr is not None:
        factor = read(weight_ptr + col, in_row)
        if OFFSET:
            factor += scalar(offset)
        y *= factor[None, :]
    if bias_ptr is not None:
        y += read(bias_ptr + col, in_row)[None, :]
    tl.store(y_ptr + at, rounded(y, y_ptr), mask=inside)


@profiled(do_not_specialize=_NOT_SPECIALIZED)
def _norm_forward_long(
    y_ptr, s_ptr, mean_ptr, rstd_ptr, x_ptr, residual_ptr, weight_ptr, bias_ptr, eps, offset, n_rows, size,
    CENTER: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row of any length, BLOCK columns at a time. Grid (n_rows,). Arguments as in _norm_forward_on_chip."""
    row = tl.program_id(0).to(tl.int64)
    columns = size.to(tl.int64) * UNIT
    at = row * columns
    # of each lane: the mean so far, and the sum of squares of the differences from it
    mean = tl.zeros([BLOCK], dtype=tl.float32)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        col = start + tl.arange(0, BLOCK)
        inside = col < columns
        s = read_evicting(x_ptr + at + col, inside, "evict_last")
        if residual_ptr is not None:
            other = read_evicting(residual_ptr + at + col, inside, "evict_last")
            total = rounded(s + other, s_ptr)
            tl.store(s_ptr + at + col, total, mask=inside)
            s = total.to(tl.float32)
        if CENTER:
            difference = tl.where(inside, s - mean, 0.0)
            mean += difference / (start // BLOCK + 1)
            squares += difference * (s - mean)
        else:
            squares += s * s
    n = columns.to(tl.float32)
    if CENTER:
        # lanes of the last block that are outside have one element less
        count = ((columns - tl.arange(0, BLOCK) + BLOCK - 1) // BLOCK).to(tl.float32)
        center = tl.sum(mean * count, axis=0) / n
        squares += count * (mean - center) * (mean - center)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, center)
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / n + scalar(eps))
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)

    for start in range(0, columns, BLOCK):
        col = start + tl.arange(0, BLOCK)
        inside = col < columns
        s = read_evicting(x_ptr + at + col, inside, "evict_first")
        if residual_ptr is not None:  # not from s_ptr: another thread may have written the element
            other = read_evicting(residual_ptr + at + col, inside, "evict_first")
            s = rounded(s + other, s_ptr).to(tl.float32)
        if CENTER:
            s -= center
        y = s * rstd
        if weight_ptr is not None:
            y *= read(weight_ptr + col, inside) + scalar(offset)
        if bias_ptr is not None:
            y += read(bias_ptr + col, inside)
        tl.store(y_ptr + at + col, rounded(y, y_ptr), mask=inside)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def columns_of(col, size, UNIT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Return which columns exist, and their number, 64-bit.

    EVEN: all exist. They are a constant then, which Triton removes from loads and stores.
    """
    exist = tl.full([BLOCK], 1, tl.int1)
    columns = tl.full([], BLOCK, tl.int64)
    if not EVEN:
        exist = col < size * UNIT
        columns = size.to(tl.int64) * UNIT
    return exist, columns

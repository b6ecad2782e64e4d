"""grouped_matmul with Triton: the products of ``_grouped.py``, and a pass over rows without a group, and for the bias.

Without a bias that pass reads and writes nothing but the rows past the last end, which are 0. Nothing waits for the
device, and there are no atomics.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from fusedops.dtypes import no_autocast
from fusedops.ops.experts.arguments import ends_of
from fusedops.ops.experts.formulas import valid_ends
from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import read
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.experts._expert_rows import sum_groups
from fusedops_triton.experts._grouped import rows_by_weight, weights_of_rows
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import (
    FLAT_PER_THREAD,
    FLAT_THREADS,
    ceil_div,
    gated_columns,
    power_of_two,
    warps_for,
)

# ---------------------------------------------------------------------------------------------------------- launchers


def products_forward(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return the products of all groups, (S, N)."""
    if weight.shape[0] == 0:
        return x.new_zeros(x.shape[0], weight.shape[2 if transposed else 1])
    with no_autocast(x.device.type):
        ends = _ends(offsets, x.shape[0])
        y = rows_by_weight(x.resolve_neg().contiguous(), weight, ends, not transposed)
        _finish(y, None if bias is None else bias.resolve_neg().contiguous(), ends)
    return y


def products_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    transposed: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias, each where it is wanted."""
    if weight.shape[0] == 0:
        first, second, third = (
            torch.zeros_like(each, memory_format=torch.contiguous_format) if each is not None and need else None
            for each, need in zip((x, weight, bias), needs)
        )
        return first, second, third
    dx = dweight = dbias = None
    with no_autocast(x.device.type):
        grad, x = grad.resolve_neg().contiguous(), x.resolve_neg().contiguous()
        ends = _ends(offsets, x.shape[0])
        if needs[0]:
            dx = rows_by_weight(grad, weight, ends, transposed)
            _finish(dx, None, ends)
        if needs[1]:
            dweight = weights_of_rows(*((x, grad) if transposed else (grad, x)), ends, weight)
        if needs[2] and bias is not None:
            dbias = sum_groups(grad, None, ends, None, bias)
    return dx, dweight, dbias


def _ends(offsets: Tensor, rows: int) -> Tensor:
    """Return the ends of the groups, (E,) int32."""
    if offsets.is_cpu:  # in the interpreter: raises for ends that are not valid
        ends_of("grouped_matmul", offsets, rows)
    return valid_ends(offsets, rows).int()


def _finish(y: Tensor, bias: Tensor | None, ends: Tensor) -> None:
    """Add the bias (E, N) to the rows of y (S, N), and set those past the last end to 0."""
    if y.numel():
        launch = _finish_launch(*y.shape, ends.shape[0], y.element_size())
        group = None
        if bias is not None:
            group = torch.searchsorted(ends, torch.arange(y.shape[0], device=y.device, dtype=ends.dtype), right=True)
        launch(y, y, bias, group, ends)


@cached_by_layout
def _finish_launch(n_rows: int, size: int, experts: int, element_size: int) -> Launch:
    per_thread = FLAT_PER_THREAD[element_size] // 2
    tile, unit_n = per_thread * FLAT_THREADS, unit(size)
    cols = gated_columns(size, tile, element_size)
    rows = min(tile // cols, power_of_two(n_rows))
    constants = {"UNIT": unit_n, "ROWS": rows, "COLS": cols}
    grid = (ceil_div(size, cols) * ceil_div(n_rows, rows),)
    return Launch(_add_bias, grid, (n_rows, experts, size // unit_n), constants, warps_for(rows * cols, per_thread))


# -------------------------------------------------------------------------------------------------------- jit function


@profiled(do_not_specialize=["n_rows", "experts", "size"])
def _add_bias(
    y_ptr, bias_ptr, group_ptr, ends_ptr, n_rows, experts, size,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS * COLS elements in place. Grid (cdiv(N, COLS) * cdiv(n_rows, ROWS),), N = size * UNIT."""
    columns = size.to(tl.int64) * UNIT
    tiles = ((columns + COLS - 1) // COLS).to(tl.uint32)
    program = tl.program_id(0).to(tl.uint32)
    row = (program // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = (program % tiles).to(tl.int64) * COLS + tl.arange(0, COLS)
    known, there = row < tl.load(ends_ptr + experts - 1), row < n_rows
    at, inside = row[:, None] * columns + col[None, :], (col < columns)[None, :]
    if bias_ptr is None:
        zero = tl.zeros((ROWS, COLS), y_ptr.dtype.element_ty)
        tl.store(y_ptr + at, zero, (there & ~known)[:, None] & inside)
    else:
        e = tl.load(group_ptr + row, known & there, 0).to(tl.int64)
        fits = (known & there)[:, None] & inside
        y = read(y_ptr + at, fits)
        y += read(bias_ptr + e[:, None] * columns + col[None, :], fits)
        tl.store(y_ptr + at, rounded(y, y_ptr), there[:, None] & inside)

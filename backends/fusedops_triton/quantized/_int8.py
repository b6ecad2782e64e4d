"""int8_linear with Triton: tiles of exact products of integers, whose sums have no order.

The rows of x are rounded by the formula in torch, whose operations each round once. The gradients are the formulas of
the op.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from fusedops.ops.quantized.int8_linear import Int8LinearArgs, output_dtype
from fusedops.quantization import rounded_rows
from fusedops_triton._jit._bias import rounded
from fusedops_triton._jit._common import read
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div

# None of these settings was measured on a GPU. tl.dot takes no fewer than 16 rows.
_FEW_ROWS, _ROWS, _OUTPUTS, _TERMS, _WARPS = 16, 64, 64, 64, 4


def int8_linear(a: Int8LinearArgs) -> Tensor:
    """Compute the op. The weight is read where it lies, in rows of INT8 too."""
    x = a.x.resolve_neg()
    y = x.new_empty((*x.shape[:-1], a.weight.shape[0]), dtype=output_dtype(a))
    if not y.numel():
        return y
    q, x_scale = rounded_rows(x, a.x_scale, a.smooth) if x.is_floating_point() else (x, a.x_scale)
    assert x_scale is not None  # by the op's constraints
    flat = q.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    weight = a.weight.resolve_neg()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    scales = (each.resolve_neg().float().contiguous() for each in (x_scale, a.weight_scale))
    bias = None if a.bias is None else a.bias.resolve_neg().contiguous()
    launch = _tiles_launch(*flat.shape, *weight.shape[:1], weight.stride(0))
    launch(y, y, flat, weight, *scales, bias)
    return y


@cached_by_layout
def _tiles_launch(rows: int, columns: int, outputs: int, weight_row: int) -> Launch:
    across, at_once = ceil_div(outputs, _OUTPUTS), _FEW_ROWS if rows <= _FEW_ROWS else _ROWS
    constants = {"BM": at_once, "BN": _OUTPUTS, "BK": _TERMS}
    sizes = (rows, columns, outputs, weight_row, across)
    return Launch(_tiles, (ceil_div(rows, at_once) * across,), sizes, constants, _WARPS, fuses=False)


@profiled(do_not_specialize=["rows", "outputs", "across"])
def _tiles(
    y_ptr, q_ptr, weight_ptr, x_scale_ptr, weight_scale_ptr, bias_ptr, rows, columns, outputs, weight_row, across,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute BM * BN elements. Grid (cdiv(rows, BM) * across,), across = cdiv(outputs, BN)."""
    m = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    row_ptr = q_ptr + m.to(tl.int64)[:, None] * columns
    of_weight_ptr = weight_ptr + n.to(tl.int64)[None, :] * weight_row
    sums = tl.zeros((BM, BN), tl.int32)
    for first in range(0, columns, BK):
        k = first + tl.arange(0, BK)
        q = tl.load(row_ptr + k[None, :], (m < rows)[:, None] & (k < columns)[None, :], 0)
        weight = tl.load(of_weight_ptr + k[:, None], (k < columns)[:, None] & (n < outputs)[None, :], 0)
        sums = tl.dot(q, weight, sums, out_dtype=tl.int32)
    value = sums.to(tl.float32) * read(x_scale_ptr + m, m < rows)[:, None]
    value *= read(weight_scale_ptr + n, n < outputs)[None, :]
    if bias_ptr is not None:
        value += read(bias_ptr + n, n < outputs)[None, :]
    at = m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(y_ptr + at, rounded(value, y_ptr), (m < rows)[:, None] & (n < outputs)[None, :])

"""Two parts of one attention made one, in Triton, forward and backward: whole rows on chip, each read once.

A program has some rows of D columns. Tensors are read by their strides, (batch, head, position), as attention returns
views with the heads and the positions exchanged in memory. A part without keys is not read. The arithmetic is in
float32 and rounded once.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportAssignmentType=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.dtypes import promoted
from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import exp, read
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div
from fusedops_triton.norms._norm import columns_of, ready
from fusedops_triton.norms._norm_settings import gated_norm_plan

Strides = tuple[int, int, int]  # batch, head, position
_NONE: Strides = (0, 0, 0)

# ---------------------------------------------------------------------------------------------------------- launchers


def merge_forward(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Compute out and lse. out_a, out_b: (..., D), floating. lse_a, lse_b: (...), float32. Any strides."""
    out = _like(out_a, promoted(out_a, out_b))
    lse = torch.empty(lse_a.shape, dtype=torch.float32, device=out.device)
    if lse.numel():
        rows = [_as_4d(each) for each in (out_a, out_b, out)]
        widest = max(each.element_size() for each in rows)
        launch = _forward_launch(rows[0].shape, tuple(map(_strides, rows)), widest)
        launch(out, out, lse, rows[0], ready(lse_a), rows[1], ready(lse_b))
    return out, lse


def merge_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the four arguments, each where it is wanted. Arguments as in the forward."""
    da, db = (_like(own, own.dtype) if need else None for own, need in ((out_a, needs[0]), (out_b, needs[2])))
    dlse_a, dlse_b = (
        torch.empty(own.shape, dtype=own.dtype, device=own.device) if need else None
        for own, need in ((lse_a, needs[1]), (lse_b, needs[3]))
    )
    if lse_a.numel():
        rows = [_as_4d(each) for each in (grad_out, out_a, out_b)]
        strides = (*map(_strides, rows), *(_NONE if each is None else _strides(_as_4d(each)) for each in (da, db)))
        widest = max(each.element_size() for each in rows)
        launch = _backward_launch(rows[0].shape, strides, widest, (da is not None, db is not None))
        tensors = (rows[0], ready(grad_lse), rows[1], ready(lse_a), rows[2], ready(lse_b))
        launch(out_a, da, dlse_a, db, dlse_b, *tensors)
    return da, dlse_a, db, dlse_b


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor whose dims in memory have the order of those of ``tensor``, where kernels have them."""
    if tensor.dim() <= 4:
        empty = torch.empty_like(tensor, dtype=dtype)
        if empty.stride(-1) == 1:
            return empty
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)


def _as_4d(tensor: Tensor) -> Tensor:
    """Return a view (B, N, S, D) with contiguous rows; a copy where there is none."""
    tensor = tensor.resolve_neg()
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    shape = tensor.shape
    if len(shape) > 4:
        return tensor.reshape(1, 1, shape[:-1].numel(), shape[-1])
    return tensor if len(shape) == 4 else tensor[(None,) * (4 - len(shape))]


def _strides(tensor: Tensor) -> Strides:
    """Return the strides of rows; 0 along a dim of one entry, whose stride is any number."""
    batch, head, position = (step if n > 1 else 0 for step, n in zip(tensor.stride(), tensor.shape[:3]))
    return batch, head, position


@cached_by_layout
def _forward_launch(shape: torch.Size, strides: tuple[Strides, ...], widest: int) -> Launch:
    """Return the launch for (B, N, S, D). strides: of out_a, out_b and out."""
    return _launch(_merge_forward, shape, strides, widest, len({*strides}) == 1)


@cached_by_layout
def _backward_launch(shape: torch.Size, strides: tuple[Strides, ...], widest: int, wanted: tuple[bool, bool]) -> Launch:
    """Return the launch for (B, N, S, D). strides: of the gradient of out, of out_a, out_b, and of their gradients."""
    present = {*strides[:3], *(each for each, need in zip(strides[3:], wanted) if need)}
    return _launch(_merge_backward, shape, strides, widest, len(present) == 1)


def _launch(kernel: object, shape: torch.Size, strides: tuple[Strides, ...], widest: int, same: bool) -> Launch:
    batch, heads, positions, size = shape
    steps = [step for each in strides for step in each]
    of_rows = unit(gcd(size, *steps)) if size else 1
    setting = gated_norm_plan(max(size, 1), widest)
    n_rows = batch * heads * positions
    constants = {
        "UNIT": of_rows, "NARROW": n_rows < 2**31 - setting.rows, "SAME": same,
        "EVEN": size == setting.block and n_rows % setting.rows == 0, "ROWS": setting.rows, "BLOCK": setting.block,
    }  # fmt: skip
    sizes = (n_rows, heads, positions, size // of_rows, *(step // of_rows for step in steps))
    return Launch(kernel, (ceil_div(n_rows, setting.rows),), sizes, constants, setting.warps)


# ------------------------------------------------------------------------------------------------------------ kernels
# Triton does not specialise on sizes and strides: UNIT gives the compiler the alignment.


@profiled(
    do_not_specialize=[
        "n_rows", "heads", "positions", "size", "a_batch", "a_head", "a_position", "b_batch", "b_head", "b_position",
        "out_batch", "out_head", "out_position",
    ]
)  # fmt: skip
def _merge_forward(
    out_ptr, lse_ptr, a_ptr, lse_a_ptr, b_ptr, lse_b_ptr,
    n_rows, heads, positions, size, a_batch, a_head, a_position, b_batch, b_head, b_position,
    out_batch, out_head, out_position,
    UNIT: tl.constexpr, NARROW: tl.constexpr, SAME: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows. Grid (cdiv(n_rows, ROWS),); D = size * UNIT <= BLOCK; strides in units of UNIT.

    a_ptr, b_ptr, out_ptr: (B, N, S, D). lse_a_ptr, lse_b_ptr, lse_ptr: (B, N, S), contiguous.
    NARROW: rows are counted in 32 bits. SAME: the tensors have the same strides. EVEN: D = BLOCK, and n_rows is a
    multiple of ROWS.
    """
    row, batch, head, position = _rows(heads, positions, NARROW, ROWS)
    there = row < n_rows
    col = tl.arange(0, BLOCK)
    inside = _inside(col, there, size, UNIT, EVEN, BLOCK)
    a_at = _at(batch, head, position, col, a_batch, a_head, a_position, UNIT)
    b_at = a_at if SAME else _at(batch, head, position, col, b_batch, b_head, b_position, UNIT)
    a, b = read(a_ptr + a_at, inside), read(b_ptr + b_at, inside)  # no read waits for another one
    weight_a, weight_b, lse, has_a, has_b = _weights(lse_a_ptr, lse_b_ptr, row, there)
    a, b = tl.where(has_a[:, None], a, 0.0), tl.where(has_b[:, None], b, 0.0)  # a part without keys may have NaN
    out = a * weight_a[:, None] + b * weight_b[:, None]
    out_at = a_at if SAME else _at(batch, head, position, col, out_batch, out_head, out_position, UNIT)
    tl.store(out_ptr + out_at, rounded(out, out_ptr), mask=inside)
    tl.store(lse_ptr + row, lse, mask=there)


@profiled(
    do_not_specialize=[
        "n_rows", "heads", "positions", "size", "grad_batch", "grad_head", "grad_position", "a_batch", "a_head",
        "a_position", "b_batch", "b_head", "b_position", "da_batch", "da_head", "da_position", "db_batch", "db_head",
        "db_position",
    ]
)  # fmt: skip
def _merge_backward(
    da_ptr, dlse_a_ptr, db_ptr, dlse_b_ptr, grad_ptr, grad_lse_ptr, a_ptr, lse_a_ptr, b_ptr, lse_b_ptr,
    n_rows, heads, positions, size, grad_batch, grad_head, grad_position, a_batch, a_head, a_position,
    b_batch, b_head, b_position, da_batch, da_head, da_position, db_batch, db_head, db_position,
    UNIT: tl.constexpr, NARROW: tl.constexpr, SAME: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of ROWS rows, each whose pointer is not None. As _merge_forward; grad_ptr: as out_ptr."""
    row, batch, head, position = _rows(heads, positions, NARROW, ROWS)
    there = row < n_rows
    col = tl.arange(0, BLOCK)
    inside = _inside(col, there, size, UNIT, EVEN, BLOCK)
    grad_at = _at(batch, head, position, col, grad_batch, grad_head, grad_position, UNIT)
    grad = read(grad_ptr + grad_at, inside)
    OF_LSE: tl.constexpr = dlse_a_ptr is not None or dlse_b_ptr is not None
    if OF_LSE:  # before the first store, behind which no read begins
        a_at = grad_at if SAME else _at(batch, head, position, col, a_batch, a_head, a_position, UNIT)
        b_at = grad_at if SAME else _at(batch, head, position, col, b_batch, b_head, b_position, UNIT)
        difference = read(a_ptr + a_at, inside) - read(b_ptr + b_at, inside)
        grad_lse = tl.load(grad_lse_ptr + row, mask=there, other=0.0).to(tl.float32)
    weight_a, weight_b, _, has_a, has_b = _weights(lse_a_ptr, lse_b_ptr, row, there)
    if OF_LSE:
        # numbers of a part without keys may be NaN
        moved = tl.where(has_a & has_b, tl.sum(grad * difference, axis=1), 0.0)
    if da_ptr is not None:
        da_at = grad_at if SAME else _at(batch, head, position, col, da_batch, da_head, da_position, UNIT)
        da = tl.where(has_a[:, None], grad * weight_a[:, None], 0.0)
        tl.store(da_ptr + da_at, rounded(da, da_ptr), mask=inside)
    if db_ptr is not None:
        db_at = grad_at if SAME else _at(batch, head, position, col, db_batch, db_head, db_position, UNIT)
        db = tl.where(has_b[:, None], grad * weight_b[:, None], 0.0)
        tl.store(db_ptr + db_at, rounded(db, db_ptr), mask=inside)
    if dlse_a_ptr is not None:
        dlse_a = tl.where(has_a, weight_a * (grad_lse + weight_b * moved), 0.0)
        tl.store(dlse_a_ptr + row, rounded(dlse_a, dlse_a_ptr), mask=there)
    if dlse_b_ptr is not None:
        dlse_b = tl.where(has_b, weight_b * (grad_lse - weight_a * moved), 0.0)
        tl.store(dlse_b_ptr + row, rounded(dlse_b, dlse_b_ptr), mask=there)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def _rows(heads, positions, NARROW: tl.constexpr, ROWS: tl.constexpr):
    """Return the rows of this program, and the batch, head and position of each; all but NARROW ones 64-bit."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    OF: tl.constexpr = tl.uint32 if NARROW else tl.int64
    counted, heads, positions = row.to(OF), heads.to(OF), positions.to(OF)
    rest = counted // positions
    head, position = rest % heads, counted % positions
    return row, (rest // heads).to(tl.int64), head.to(tl.int64), position.to(tl.int64)


@triton.jit
def _at(batch, head, position, col, of_batch, of_head, of_position, UNIT: tl.constexpr):
    """Return the elements of rows, 64-bit."""
    return ((batch * of_batch + head * of_head + position * of_position) * UNIT)[:, None] + col[None, :]


@triton.jit
def _inside(col, there, size, UNIT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Return which elements of a tile exist."""
    in_row, _ = columns_of(col, size, UNIT, EVEN, BLOCK)
    inside = in_row[None, :] & tl.full([there.shape[0], 1], 1, tl.int1)
    if not EVEN:
        inside = inside & there[:, None]
    return inside


@triton.jit
def _weights(lse_a_ptr, lse_b_ptr, row, there):
    """Return the weights of both parts, lse, and which parts have keys.

    The weights are logistic functions of the difference, by the exponential of a number that is not positive.
    """
    x = tl.load(lse_a_ptr + row, mask=there, other=-float("inf")).to(tl.float32)
    y = tl.load(lse_b_ptr + row, mask=there, other=-float("inf")).to(tl.float32)
    has_a, has_b = x != -float("inf"), y != -float("inf")
    both = has_a & has_b
    difference = tl.where(both, x - y, 0.0)
    e = exp(-tl.abs(difference))
    large = 1.0 / (1.0 + e)
    small = e * large
    a_is_larger = difference >= 0
    weight_a = tl.where(has_a, tl.where(has_b, tl.where(a_is_larger, large, small), 1.0), 0.0)
    weight_b = tl.where(has_b, tl.where(has_a, tl.where(a_is_larger, small, large), 1.0), 0.0)
    joined = tl.where(a_is_larger, x, y) + tl.log(1.0 + e)
    joined = tl.where((x == float("inf")) & (y == float("inf")), x, joined)  # whose difference is NaN
    return weight_a, weight_b, tl.where(both, joined, tl.where(has_a, x, y)), has_a, has_b

"""Cross entropy in Triton: the loss of each row in one pass over the logits, and their gradient in one pass.

    forward     A program reads rows of logits once, BLOCK columns at a time, with running maxima and sums
                (``_logits.py``). It writes the loss and lse of each row. Programs of short rows hold several.
    reduction   One program adds up the losses of the rows, and counts the targets that are not ignored: 20 bytes a row,
                beside 100 KB and more of logits. In a fixed order, so the same input gives the same bits.
    backward    Element by element, from lse: a program computes a block of columns of one row or several.

Common to all kernels:

- The arithmetic is float32. The loss of a row is computed as (maximum - logit of the target) +
  log(sum), which has no cancellation where the loss is small.
- The logits of ignored rows are not read, but for short rows in the forward. The loss of a row with a target out of
  range is NaN, and so is its gradient: no one waits for the device to raise.
- Logits are read with their strides where the last one is 1 and the rows have at most two: logits[:, :-1], and a
  vocabulary cut out of a padded one. Otherwise they are made contiguous first.
- Offsets of rows are 64-bit: rows * V exceeds 2**31 in ordinary use. Strides are passed as ``stride * UNIT``, so that
  rows of a length that is divisible by 8 but not by 16 have 16-byte accesses. Long rows that begin anywhere have them
  in the forward too, from their first multiple of 16 bytes on.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.ops.losses.arguments import CrossEntropyArgs, CrossEntropyGradArgs
from fusedops.ops.losses.formulas import LossOptions
from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import exp, read, read_evicting, scalar, widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div, warps_for
from fusedops_triton.losses._logits import added, capped, slope
from fusedops_triton.losses._loss_settings import loss_gradient_plan, loss_group, loss_plan

# ---------------------------------------------------------------------------------------------------------- launchers


def cross_entropy(a: CrossEntropyArgs, save: bool) -> tuple[Tensor, Tensor | None, None]:
    """Compute the op for any rank, number of classes and strides. log_prob is not kept: lse serves."""
    return *cross_entropy_forward(a.logits, a.target, a.options, save), None


def cross_entropy_backward(a: CrossEntropyGradArgs) -> Tensor:
    """Compute the gradient of the logits."""
    return logits_gradient(a.grad, a.logits, a.lse, a.target, a.options)


def _scalars(options: LossOptions) -> tuple[float | int, ...]:
    """Return ignore_index, label_smoothing, z_loss and softcap as kernel arguments."""
    numbers = (options.label_smoothing, options.z_loss, 1.0 if options.softcap is None else options.softcap)
    return (options.ignore_index, *(float(number) for number in numbers))


def cross_entropy_forward(
    logits: Tensor, target: Tensor, options: LossOptions, save: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the loss.

    Args:
        logits: (..., V), float16, bfloat16 or float32, any strides.
        target: (...), int64, any strides.
        options: the other arguments of the op.
        save: True also returns lse.

    Returns:
        The loss: () or, for the reduction "none", (...); lse (...), or None. float32.
    """
    rows = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(rows) if save else None
    target = target.resolve_neg().contiguous()
    if rows.numel():
        logits = _make_supported(logits)
        launch = _forward_launch(
            logits.shape, logits.stride(), logits.dtype, options.label_smoothing != 0, options.softcap is not None
        )
        launch(rows, rows, lse, logits, target, *_scalars(options))
    if options.reduction == "none":
        return rows, lse
    total = torch.empty((), dtype=torch.float32, device=logits.device)
    mean = options.reduction == "mean"
    launch = _sum_launch(target.numel(), mean)
    divisor = options.denominator.resolve_neg() if mean and options.denominator is not None else None
    launch(total, total, rows, target, divisor, options.ignore_index)
    return total, lse


def logits_gradient(grad: Tensor, logits: Tensor, lse: Tensor, target: Tensor, options: LossOptions) -> Tensor:
    """Compute the gradient of the logits (..., V), contiguous, from lse of the forward.

    Args:
        grad: the gradient of the loss: (), or (...) for the reduction "none"; any strides.
        logits: as in the forward.
        lse: (...), of the forward; any strides.
        target: as in the forward.
        options: as in the forward.
    """
    dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if dx.numel() == 0:
        return dx
    logits, target = _make_supported(logits), target.resolve_neg().contiguous()
    divisor = options.denominator if options.reduction == "mean" else None
    if options.reduction == "mean" and divisor is None:
        divisor = torch.empty((), dtype=lse.dtype, device=lse.device)
        _sum_launch(target.numel(), True)(divisor, divisor, None, target, None, options.ignore_index)
    launch = _backward_launch(
        logits.shape, logits.stride(), logits.dtype, options.reduction == "none", options.label_smoothing != 0,
        options.softcap is not None,
    )  # fmt: skip
    grad, lse = grad.resolve_neg().contiguous(), lse.resolve_neg().contiguous()
    divisor = None if divisor is None else divisor.resolve_neg()
    launch(dx, dx, grad, divisor, logits, lse, target, *_scalars(options))
    return dx


_Ints = tuple[int, ...]


@cached_by_layout
def _forward_launch(shape: _Ints, strides: _Ints, dtype: torch.dtype, smooth: bool, cap: bool) -> Launch:
    sizes, aligned = _sizes(shape, strides)
    setting = loss_plan(shape[-1], dtype.itemsize)
    constants = {
        "SMOOTH": smooth, "CAP": cap, "UNIT": aligned, "FLAT": sizes[1] == sizes[0],
        "ROWS": setting.rows, "SHORT": setting.on_chip, "BLOCK": setting.block,
        "GROUP": loss_group(setting, dtype.itemsize),
    }  # fmt: skip
    grid = (ceil_div(math.prod(shape[:-1]), setting.rows),)
    return Launch(_forward, grid, sizes, constants, setting.warps)


@cached_by_layout
def _backward_launch(
    shape: _Ints, strides: _Ints, dtype: torch.dtype, per_row: bool, smooth: bool, cap: bool
) -> Launch:
    sizes, aligned = _sizes(shape, strides)
    setting = loss_gradient_plan(shape[-1], dtype.itemsize)
    constants = {
        "PER_ROW": per_row, "SMOOTH": smooth, "CAP": cap, "UNIT": aligned, "FLAT": sizes[1] == sizes[0],
        "ROWS": setting.rows, "BLOCK": setting.block,
    }  # fmt: skip
    grid = (ceil_div(math.prod(shape[:-1]), setting.rows) * ceil_div(shape[-1], setting.block),)
    return Launch(_backward, grid, sizes, constants, setting.warps)


@cached_by_layout
def _sum_launch(n_rows: int, mean: bool) -> Launch:
    # one program: of many rows, each thread has several on the way
    block, per_thread = (1024, 8) if n_rows <= 1024 else (4096, 4)
    constants = {"MEAN": mean, "BLOCK": block}
    return Launch(_sum_rows, (1,), (n_rows,), constants, warps_for(block, per_thread))


def _sizes(shape: _Ints, strides: _Ints) -> tuple[_Ints, int]:
    """Return n_rows, the rows of the inner dim, its stride and the outer one, and V; and the unit of the last three."""
    walk = _walk(shape, strides)
    assert walk is not None
    inner, inner_stride, outer_stride = walk
    size = shape[-1]
    aligned = min([unit(size), *(unit(stride) for stride in (inner_stride, outer_stride) if stride)])
    scaled = (inner_stride // aligned, outer_stride // aligned, size // aligned)
    return (math.prod(shape[:-1]), inner, *scaled), aligned


def _walk(shape: _Ints, strides: _Ints) -> tuple[int, int, int] | None:
    """Return the size and the stride of the inner dim of the rows, and the stride of the outer one; None if the leading
    dims are not two such, or the last stride is not 1.
    """
    if shape[-1] > 1 and strides[-1] != 1:
        return None
    dims: list[list[int]] = []  # [size, stride], from the inner one, merged where they follow each other
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1])):
        if size == 1:
            continue
        if dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1][0] *= size
        else:
            dims.append([size, stride])
    if len(dims) > 2:
        return None
    dims += [[1, 0]] * (2 - len(dims))
    return dims[0][0], dims[0][1], dims[1][1]


def _make_supported(logits: Tensor) -> Tensor:
    """Return the logits if ``_walk`` supports their strides, else a copy."""
    logits = logits.resolve_neg()
    return logits if _walk(logits.shape, logits.stride()) is not None else logits.contiguous()


# ------------------------------------------------------------------------------------------------------------ kernels
# Triton does not specialise on sizes and strides: UNIT gives the compiler the alignment.

_NOT_SPECIALIZED = [
    "ignore_index", "label_smoothing", "z_loss", "softcap", "n_rows", "inner", "stride_inner", "stride_outer", "size",
]  # fmt: skip


@profiled(do_not_specialize=_NOT_SPECIALIZED)
def _forward(
    loss_ptr, lse_ptr, x_ptr, target_ptr, ignore_index, label_smoothing, z_loss, softcap,
    n_rows, inner, stride_inner, stride_outer, size,
    SMOOTH: tl.constexpr, CAP: tl.constexpr, UNIT: tl.constexpr, FLAT: tl.constexpr, ROWS: tl.constexpr,
    SHORT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute the loss and lse of ROWS rows. Grid (cdiv(n_rows, ROWS),); V = size * UNIT. SHORT: V <= BLOCK.

    loss_ptr: (n_rows,). lse_ptr: (n_rows,), or None. x_ptr: (n_rows, V), by ``_row_offset``. target_ptr: (n_rows,).
    label_smoothing, z_loss, softcap: see ``scalar``. SMOOTH, CAP: whether there is smoothing, and a softcap.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = size.to(tl.int32) * UNIT
    exists = row < n_rows
    target = tl.load(target_ptr + row, mask=exists, other=0)
    counts = exists & (target != ignore_index)
    known = counts & (target >= 0) & (target < columns)
    offset = _row_offset(row, inner, stride_inner, stride_outer, UNIT, FLAT)
    x_row = x_ptr + offset
    wanted = read(x_row + target, known)  # arrives while the row is read
    if CAP:
        wanted = capped(wanted, softcap)
    stop = columns
    if not SHORT:  # ROWS is 1: nothing to read of an ignored row
        stop = tl.where(tl.sum(counts.to(tl.int32), axis=0) > 0, columns, 0)

    # `total` is the sum of exp(z - top), `top` the maximum so far, for every GROUP columns of a block: a thread has
    # those of the columns that it reads, and no thread waits for another before the end
    GROUPS: tl.constexpr = BLOCK // GROUP
    top = tl.full([ROWS, GROUPS], float("-inf"), tl.float32)
    total = tl.full([ROWS, GROUPS], 0.0, tl.float32)
    sums = tl.full([ROWS, GROUPS], 0.0, tl.float32)
    from_row = x_row
    APART: tl.constexpr = GROUP < BLOCK and UNIT < GROUP  # ROWS is 1
    if APART:
        # the columns before the first multiple of 16 bytes and those after the last one are read by themselves
        lead = ((0 - offset) & (GROUP - 1)).to(tl.int32)
        from_row = x_ptr + tl.multiple_of(offset + lead, GROUP)
        between = tl.maximum(stop - tl.sum(lead, axis=0), 0) // GROUP * GROUP
        at = tl.arange(0, 2 * GROUP)
        edge = tl.where(at < GROUP, at, lead + between + at - GROUP)
        on_edge = (edge < tl.where(at < GROUP, lead, stop))[None, :] & counts[:, None]
        z_edge = _logits(x_row[:, None] + edge[None, :], on_edge, softcap, CAP, True)
        stop = tl.multiple_of(between, GROUP)
    whole = 0  # columns that are read without masks
    if not SHORT:
        whole = tl.maximum(stop - 1, 0) // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            col = start + tl.arange(0, BLOCK)
            z = _logits(from_row[:, None] + col[None, :], None, softcap, CAP, False)
            top, total, sums = added(top, total, sums, z, z, SMOOTH, GROUP)
    col = whole + tl.arange(0, BLOCK)
    # short rows do not wait for their target: those that are ignored are read too
    inside = (exists if SHORT else counts)[:, None] & (col < stop)[None, :]
    z = _logits(from_row[:, None] + col[None, :], inside, softcap, CAP, True)
    top, total, sums = added(top, total, sums, z, tl.where(inside, z, 0.0) if SMOOTH else z, SMOOTH, GROUP)
    highest = tl.max(top, axis=1)
    if APART:
        highest = tl.maximum(highest, tl.max(z_edge, axis=1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(total * exp(top - shift[:, None]), axis=1)
    top = highest
    if SMOOTH:
        sums = tl.sum(sums, axis=1)
    if APART:
        total += tl.sum(exp(z_edge - shift[:, None]), axis=1)
        if SMOOTH:
            sums += tl.sum(tl.where(on_edge, z_edge, 0.0), axis=1)

    # NaN if all logits are -inf, as in torch
    total = tl.where(counts, tl.where(total == 0.0, float("nan"), total), 1.0)
    top = tl.where(counts, top, 0.0)
    rest = tl.log(total)
    lse = top + rest
    loss = (top - wanted) + rest
    if SMOOTH:
        smoothing = scalar(label_smoothing)
        loss = (1.0 - smoothing) * loss + smoothing * ((top - sums / columns.to(tl.float32)) + rest)
    weight = scalar(z_loss)
    loss += tl.where(weight == 0.0, 0.0, weight * lse * lse)
    loss = tl.where(known, loss, float("nan"))
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0), mask=exists)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, tl.where(counts, lse, 0.0), mask=exists)


@profiled(do_not_specialize=["ignore_index", "n_rows"])
def _sum_rows(
    out_ptr, loss_ptr, target_ptr, denominator_ptr, ignore_index, n_rows,
    MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the sum of the losses, divided by the denominator or the number of rows that count if MEAN. Grid (1,).

    out_ptr: (). loss_ptr: (n_rows,), or None: compute what "mean" divides by. target_ptr: (n_rows,).
    denominator_ptr: (), or None.
    """
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    counts = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, n_rows, BLOCK):
        row = start + tl.arange(0, BLOCK).to(tl.int64)
        if loss_ptr is not None:
            sums += tl.load(loss_ptr + row, mask=row < n_rows, other=0.0)
        if MEAN and denominator_ptr is None:
            target = tl.load(target_ptr + row, mask=row < n_rows, other=0)
            counts += ((row < n_rows) & (target != ignore_index)).to(tl.int32)
    result = tl.sum(sums, axis=0)
    if MEAN:
        if denominator_ptr is None:
            divisor = tl.maximum(tl.sum(counts.to(tl.int64), axis=0), 1).to(tl.float32)
        else:
            divisor = tl.load(denominator_ptr).to(tl.float32)
        result = divisor if loss_ptr is None else result / divisor
    tl.store(out_ptr, result)


@profiled(do_not_specialize=_NOT_SPECIALIZED)
def _backward(
    dx_ptr, grad_ptr, divisor_ptr, x_ptr, lse_ptr, target_ptr, ignore_index, label_smoothing, z_loss, softcap,
    n_rows, inner, stride_inner, stride_outer, size,
    PER_ROW: tl.constexpr, SMOOTH: tl.constexpr, CAP: tl.constexpr, UNIT: tl.constexpr, FLAT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK columns of ROWS rows of the gradient. Grid (cdiv(n_rows, ROWS) * cdiv(V, BLOCK),); V = size * UNIT.

    dx_ptr: (n_rows, V) contiguous. grad_ptr: (n_rows,) if PER_ROW, else (). divisor_ptr: (), or None. x_ptr: (n_rows,
    V), by ``_row_offset``. lse_ptr, target_ptr: (n_rows,). The others as in _forward.
    """
    columns = size.to(tl.int32) * UNIT
    blocks = tl.cdiv(columns, BLOCK)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    exists = row < n_rows
    target = tl.load(target_ptr + row, mask=exists, other=0)
    counts = exists & (target != ignore_index)
    lse = tl.load(lse_ptr + row, mask=counts, other=0.0)
    scale = tl.load(grad_ptr + row * PER_ROW, mask=counts, other=0.0)
    if divisor_ptr is not None:
        scale = scale / tl.load(divisor_ptr).to(tl.float32)
    # 0 in an ignored row, whose logits are read as 0: so is its gradient, without a comparison for each element
    scale = tl.where(counts, scale, 0.0)
    scale = tl.where(counts & ((target < 0) | (target >= columns)), float("nan"), scale)

    inside = (col < columns)[None, :] & counts[:, None]
    x_row = x_ptr + _row_offset(row, inner, stride_inner, stride_outer, UNIT, FLAT)
    x = read_evicting(x_row[:, None] + col[None, :], inside, "evict_first")
    z = capped(x, softcap) if CAP else x
    factor = scale * (1.0 + 2.0 * (scalar(z_loss) * lse))
    dz = exp(z - lse[:, None]) * factor[:, None]
    hit = scale
    if SMOOTH:
        smoothing = scalar(label_smoothing)
        dz -= (scale * (smoothing / columns.to(tl.float32)))[:, None]
        hit = scale * (1.0 - smoothing)
    first = (program % blocks) * BLOCK
    if tl.max(((target >= first) & (target < first + BLOCK)).to(tl.int32), axis=0) != 0:  # one block of many
        dz = tl.where(col[None, :] == target[:, None], dz - hit[:, None], dz)
    dx = dz * slope(z, softcap) if CAP else dz
    out = row[:, None] * (size.to(tl.int64) * UNIT) + col[None, :]
    tl.store(dx_ptr + out, rounded(dx, dx_ptr), mask=(col < columns)[None, :] & exists[:, None])


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def _logits(pointers, inside, softcap, CAP: tl.constexpr, MASKED: tl.constexpr):
    """Return logits, capped; -inf where not ``inside``."""
    if not MASKED:
        z = widened(tl.load(pointers, eviction_policy="evict_first"))
    else:
        z = widened(tl.load(pointers, mask=inside, other=float("-inf"), eviction_policy="evict_first"))
    if CAP:
        z = capped(z, softcap)
        if MASKED:
            z = tl.where(inside, z, float("-inf"))
    return z


@triton.jit
def _row_offset(row, inner, stride_inner, stride_outer, UNIT: tl.constexpr, FLAT: tl.constexpr):
    """Return the offset of a row in elements, 64-bit: rows are in groups of ``inner``, one group if FLAT."""
    if FLAT:  # a division of 64 bits takes a hundred instructions
        return row * (stride_inner.to(tl.int64) * UNIT)
    return (row // inner * stride_outer.to(tl.int64) + row % inner * stride_inner.to(tl.int64)) * UNIT

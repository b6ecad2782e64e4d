"""linear_cross_entropy with Triton: matmuls by torch (cuBLAS, hipBLASLt), and one kernel between them.

The rows of x are computed in chunks. A matmul writes the logits of a chunk; the kernel computes their losses and turns
them into their own gradient in place; two matmuls read it. Nothing waits for the device. Up to 2 H rows of 16 bits are
one chunk, whose second of these matmuls writes the gradient of weight once, in 16 bits: see :func:`_is_one_chunk`.

- The matmuls run in the dtype of x and weight, so 16-bit logits are rounded once, as torch.nn.Linear's are. Sums,
  exponentials, the bias and the gradient of weight are float32.
- Rows of logits are padded to a multiple of 16 elements, so that every access has 16 bytes for any number of classes.
  The padding is 0 in the gradient, and is no part of what the matmuls see.
- A row is read twice, for the sum of its exponentials and for the gradient, and is written once. The rows of ignored
  targets are written only. Offsets of rows are 64-bit. There are no atomics.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.dtypes import no_autocast, promoted
from fusedops.ops.losses.arguments import LinearCrossEntropyArgs, LinearCrossEntropyGradArgs
from fusedops.ops.losses.formulas import LossOptions, Results, Wanted, loss_and_gradients, scaled_gradients
from fusedops_triton._jit._common import exp, scalar
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.losses._logits import added, read_logits, slope
from fusedops_triton.losses._loss_settings import class_tile
from fusedops_triton.losses._scaled import scaled

#: Rows of a chunk, at least. With the gradient of weight: 4096, or as many as x has columns if those are fewer, and at
#: least SUM_ROWS, but no more than half of all rows. Each chunk reads and writes that gradient, 8 bytes for every 2
#: operations of a row: on an H200, for x (4096, 4096) and 128256 classes in bfloat16, its product takes 13.0 ms by 512
#: rows, and 9.2, 7.7 and 6.6 by 1024, 2048 and 4096; the other two products take 6 ms each by any of them. So many rows
#: do not raise the peak of memory: their logits take no more than the gradient that backward rounds to 16 bits while
#: the float32 one is there.
LEAST_ROWS = 512
SUM_ROWS, MOST_SUM_ROWS = 1024, 4096
_ROUND_ROWS = 128  # of a chunk: whole tiles of a matmul
_PADDED = 16  # elements: 16 bytes of the narrowest dtype twice, and what Triton looks for in sizes


# ----------------------------------------------------------------------------------------------------------- launcher


def linear_cross_entropy(
    a: LinearCrossEntropyArgs, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the loss in chunks of rows, and the gradients of its sum over the rows that are wanted."""
    return loss_and_gradients(row_losses, a, save)


def linear_cross_entropy_backward(a: LinearCrossEntropyGradArgs) -> tuple[Tensor | None, ...]:
    """Multiply the gradients of forward by the incoming one; compute again what forward could not."""
    return scaled_gradients(row_losses, a, scaled)


def row_losses(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    chunk: int | None,
    wanted: Wanted,
    scale: Tensor | None,
) -> Results:
    """Compute the loss of each row, and the gradients of the sum of ``scale * loss``, with a scale as backward's.

    Args:
        x: (N, H), any strides.
        weight: (V, H), any strides.
        target: (N,), int64.
        bias: (V,), or None.
        options: of the loss.
        chunk: rows of a chunk, or None.
        wanted: the gradients to compute.
        scale: (N,), the weight of each row in the sum, or None for 1.
    """
    losses = x.new_empty(x.shape[0], dtype=torch.float32)
    scale = None if scale is None else scale.float().contiguous()

    def turn(chunk: Chunk) -> None:
        weights = None if scale is None else scale[chunk.at]
        loss_rows(chunk.logits, chunk.padded, losses[chunk.at], chunk.target, weights, chunk.bias, options, any(wanted))

    last = scale is not None
    return Results(losses, *in_chunks(x, weight, target, bias, options.ignore_index, chunk, wanted, turn, last))


class Chunk(NamedTuple):
    """A chunk of rows.

    Attributes:
        at: the place of its rows.
        logits: (n, V), without the bias, in rows of ``padded`` elements; turned into their gradient in place where one
            is wanted.
        padded: a multiple of 16.
        target: (n,), contiguous.
        bias: (padded,), float32, or None.
    """

    at: slice
    logits: Tensor
    padded: int
    target: Tensor
    bias: Tensor | None


def in_chunks(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    chunk: int | None,
    wanted: Wanted,
    turn: Callable[[Chunk], None],
    last: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the logits of each chunk of rows, and from what ``turn`` makes of them the gradients that are wanted.

    Returns the gradients of x, weight, bias and, in place of that of weight, of the logits.

    Args:
        x: (N, H), any strides.
        weight: (V, H), any strides.
        target: (N,), int64.
        bias: (V,), or None.
        ignore_index: the target of rows that do not count.
        chunk: rows of a chunk, or None.
        wanted: the gradients to compute.
        turn: takes each chunk.
        last: True where the gradient of weight is not multiplied by anything: it may have 16 bits.
    """
    (n_rows, size), classes = x.shape, weight.shape[0]
    common = promoted(x, weight)
    weight, target = weight.resolve_neg().to(common), target.resolve_neg().contiguous()
    dx = x.new_empty((n_rows, size)) if wanted[0] else None
    one = wanted.weight and chunk is None and _is_one_chunk(n_rows, size, common, last, wanted.logits)
    waits = one and not last  # backward computes the product
    dtype = common if one else torch.float32
    dweight = x.new_empty((classes, size), dtype=dtype) if wanted.weight and not waits else None
    if dweight is not None and n_rows == 0:
        dweight.zero_()
    dbias = x.new_zeros(classes, dtype=torch.float32) if wanted.bias else None
    padded = -(-max(classes, 1) // _PADDED) * _PADDED
    if bias is not None:
        bias = torch.nn.functional.pad(bias.resolve_neg().float(), (0, padded - classes))
    rows = n_rows if one else rows_of_chunk(n_rows, size, classes, chunk, None if dweight is None else common)
    memory = x.new_empty((rows, padded), dtype=common)
    memory[:, classes:].zero_()  # what the padding holds is read
    with no_autocast(x.device.type):
        for start in range(0, n_rows, rows):
            at = slice(start, min(start + rows, n_rows))
            targets = target[at]
            x_rows = x[at].resolve_neg()
            if dweight is not None:  # 0 for an ignored row: a NaN in it must not reach the gradient of weight
                x_rows = x_rows.masked_fill((targets == ignore_index)[:, None], 0)
            x_rows = x_rows.to(common)
            logits = memory[: x_rows.shape[0], :classes]
            torch.mm(x_rows, weight.t(), out=logits)
            turn(Chunk(at, logits, padded, targets, bias))
            if dx is not None and dx.dtype is common:
                torch.mm(logits, weight, out=dx[at])
            elif dx is not None:
                dx[at] = torch.mm(logits, weight)
            if dweight is not None:
                _add_product(dweight, logits, x_rows, start == 0)
            if dbias is not None:
                dbias += logits.sum(0, dtype=torch.float32)
    return dx, dweight, dbias, memory[:, :classes] if waits else None


def _is_one_chunk(n_rows: int, size: int, dtype: torch.dtype, last: bool, may_wait: bool) -> bool:
    """Return True where the gradient of weight is one product, which writes it once, in 16 bits.

    Backward then holds the gradient of the logits of all rows, 2 N V bytes, and that of weight, 2 V H. With a sum over
    chunks in float32, which is rounded at the end, it holds 6 V H bytes: no less for up to 2 H rows. That sum moves 18
    V H bytes for two chunks (4, then 8, then 6 to round it), the product 2.

    The factor of backward goes into the rows of x. Of float16, it would take their small numbers out of the range.

    Args:
        n_rows: N.
        size: H.
        dtype: of x and weight.
        last: see :func:`in_chunks`.
        may_wait: True where the product may wait for backward, with its factor.
    """
    waits = may_wait and dtype is torch.bfloat16
    return 0 < n_rows <= 2 * size and dtype.itemsize == 2 and (last or waits)


def rows_of_chunk(n_rows: int, size: int, classes: int, chunk: int | None, summed: torch.dtype | None) -> int:
    """Return the rows of a chunk: those whose logits take about the size of x, at least LEAST_ROWS or half of all rows.

    summed: the dtype of the arguments where the gradient of weight is wanted, which takes more rows; else None.
    """
    if chunk is not None:
        return max(1, min(chunk, n_rows))
    rows = max(LEAST_ROWS, n_rows * size // max(classes, 1))
    if summed is not None:
        rows = max(rows, SUM_ROWS, min(size, MOST_SUM_ROWS) if summed.itemsize == 2 else 0)
    rows = min(rows, max(LEAST_ROWS, -(-n_rows // 2)))
    if rows < n_rows:  # the same number of chunks, as equal as possible
        rows = -(-n_rows // -(-n_rows // rows))
        rows = -(-rows // _ROUND_ROWS) * _ROUND_ROWS
    return max(1, min(rows, n_rows))


def _add_product(total: Tensor, gradient: Tensor, x: Tensor, first: bool) -> None:
    """Add ``gradient.T @ x`` to ``total``, in the dtype of ``total`` where the device's BLAS can. first: write it."""
    if total.dtype is x.dtype:
        torch.addmm(total, gradient.t(), x, beta=0 if first else 1, out=total)
    elif adds_wide(x.device, x.dtype):
        if first:
            torch.mm(gradient.t(), x, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, gradient.t(), x, out_dtype=total.dtype, out=total)
    elif first:
        total.copy_(torch.mm(gradient.t(), x))
    else:
        total += torch.mm(gradient.t(), x)


@cache
def adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True where a matmul of 16-bit tensors can add to float32: with CUDA's BLAS, not with every other one."""
    ones = torch.ones((16, 16), dtype=dtype, device=device)
    total = torch.ones((16, 16), dtype=torch.float32, device=device)
    first = torch.zeros_like(total)
    try:
        torch.mm(ones, ones, out_dtype=torch.float32, out=first)
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    # in a first call, so that a CUDA graph is captured after it: ``warm_up`` makes one
    # torch 2.8 and 2.9 have a version that reads memory that was not written
    return bool(((first == 16) & (total == 17)).all())


def loss_rows(
    logits: Tensor,
    padded: int,
    losses: Tensor,
    target: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    options: LossOptions,
    gradient: bool,
) -> None:
    """Launch the kernel for a chunk.

    Args:
        logits: (n, V), with rows of ``padded`` elements in memory.
        padded: a multiple of 16.
        losses: (n,), written.
        target: (n,).
        scale: (n,) or None.
        bias: (padded,) or None, the dtype of ``losses``.
        options: of the loss.
        gradient: True turns the logits into their gradient.
    """
    if logits.shape[0] == 0:
        return
    given = (options.label_smoothing != 0, options.z_loss != 0, options.softcap is not None)
    launch = _launch_of(logits.shape[0], logits.shape[1], padded, logits.dtype, given, gradient)
    numbers = (options.label_smoothing, options.z_loss, 1.0 if options.softcap is None else options.softcap)
    scalars = [float(number) for number in numbers]
    launch(losses, logits, losses, target, scale, bias, *scalars, options.ignore_index)


@cached_by_layout
def _launch_of(
    n_rows: int, size: int, padded: int, dtype: torch.dtype, given: tuple[bool, bool, bool], gradient: bool
) -> Launch:
    """Return the launch for (n_rows, size). given: smoothing, z-loss and softcap are not left out."""
    setting = class_tile(padded, dtype.itemsize)
    constants = {
        "SMOOTHS": given[0], "SQUARES": given[1], "CAPS": given[2], "GRADIENT": gradient, "BLOCK": setting.block,
        "GROUP": 16 // dtype.itemsize,
    }  # fmt: skip
    return Launch(_loss_and_gradient, (n_rows,), (size, padded), constants, setting.warps)


# ------------------------------------------------------------------------------------------------------------- kernel


@profiled(do_not_specialize=["smoothing", "z_loss", "softcap", "ignore_index", "size"])
def _loss_and_gradient(
    logits_ptr, loss_ptr, target_ptr, scale_ptr, bias_ptr, smoothing, z_loss, softcap, ignore_index, size, padded,
    SMOOTHS: tl.constexpr, SQUARES: tl.constexpr, CAPS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Compute the loss of a row, and turn its logits into the gradient of ``scale * loss``. Grid (n_rows,).

    logits_ptr: (n_rows, padded), of which ``size`` columns are logits. loss_ptr, target_ptr: (n_rows,). scale_ptr:
    (n_rows,), or None. bias_ptr: (padded,), or None. smoothing, z_loss, softcap: see ``scalar``.
    """
    row = tl.program_id(0).to(tl.int64)
    line = logits_ptr + row * padded
    target = tl.load(target_ptr + row)
    ignored = target == ignore_index
    wrong = (target < 0) | (target >= size)
    place = tl.where(wrong, 0, target)
    # before any thread writes: a barrier of the reductions below is between
    at_target = place + tl.arange(0, 1)
    picked = tl.sum(read_logits(line, bias_ptr, at_target, at_target < padded, softcap, CAPS, True), axis=0)

    whole = size // BLOCK * BLOCK  # columns that are read without masks
    stop = tl.where(ignored, 0, whole)
    last = (whole + tl.arange(0, BLOCK))[None, :]
    top = tl.full([1, BLOCK // GROUP], float("-inf"), tl.float32)
    total = tl.full([1, BLOCK // GROUP], 0.0, tl.float32)
    sums = tl.full([1, BLOCK // GROUP], 0.0, tl.float32)
    for start in range(0, stop, BLOCK):
        col = (start + tl.arange(0, BLOCK))[None, :]
        z = read_logits(line, bias_ptr, col, None, softcap, CAPS, False)
        top, total, sums = added(top, total, sums, z, z, SMOOTHS, GROUP)
    if whole < padded:
        z = read_logits(line, bias_ptr, last, last < tl.where(ignored, 0, padded), softcap, CAPS, True)
        inside = last < tl.where(ignored, 0, size)
        z = tl.where(inside, z, float("-inf"))
        top, total, sums = added(top, total, sums, z, tl.where(inside, z, 0.0), SMOOTHS, GROUP)
    highest = tl.max(tl.max(top, axis=1), axis=0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total_of_row = tl.sum(tl.sum(total * exp(top - shift), axis=1), axis=0)
    lse = tl.where(ignored, 0.0, highest) + tl.log(tl.where(ignored, 1.0, total_of_row))

    smooth = scalar(smoothing)
    columns = size.to(tl.float32)
    loss = lse - (1.0 - smooth) * picked
    if SMOOTHS:
        loss -= smooth * (tl.sum(tl.sum(sums, axis=1), axis=0) / columns)
    if SQUARES:
        loss += scalar(z_loss) * lse * lse
    loss = tl.where(ignored, 0.0, tl.where(wrong, float("nan"), loss))
    tl.store(loss_ptr + row, loss)

    if GRADIENT:
        SCALED: tl.constexpr = SQUARES or scale_ptr is not None
        factor = tl.full([], 1.0, tl.float32)
        if scale_ptr is not None:
            factor = tl.load(scale_ptr + row).to(tl.float32)
        hit = factor * (1.0 - smooth)
        everywhere = factor * smooth / columns
        if SQUARES:
            factor = factor * (1.0 + 2.0 * (scalar(z_loss) * lse))
        base = tl.where(wrong, float("nan"), lse)
        for start in range(0, stop, BLOCK):
            col = (start + tl.arange(0, BLOCK))[None, :]
            z = read_logits(line, bias_ptr, col, None, softcap, CAPS, False)
            g = _gradient(z, col == target, base, factor, hit, everywhere, softcap, SCALED, SMOOTHS, CAPS)
            tl.store(line + col, g.to(logits_ptr.dtype.element_ty))
        for start in range(stop, whole, BLOCK):  # of an ignored row
            tl.store(line + start + tl.arange(0, BLOCK), tl.zeros([BLOCK], logits_ptr.dtype.element_ty))
        if whole < padded:
            z = read_logits(line, bias_ptr, last, last < tl.where(ignored, 0, padded), softcap, CAPS, True)
            g = _gradient(z, last == target, base, factor, hit, everywhere, softcap, SCALED, SMOOTHS, CAPS)
            g = tl.where(last < tl.where(ignored, 0, size), g, 0.0)
            tl.store(line + last, g.to(logits_ptr.dtype.element_ty), mask=last < padded)


@triton.jit
def _gradient(
    z, is_target, lse, factor, hit, everywhere, softcap,
    SCALED: tl.constexpr, SMOOTHS: tl.constexpr, CAPS: tl.constexpr,
):  # fmt: skip
    """Return the gradient of logits, which is lower by ``hit`` for the target: NaN where ``lse`` is."""
    g = exp(z - lse)
    if SCALED:
        g *= factor
    if SMOOTHS:
        g -= everywhere
    g -= tl.where(is_target, hit, 0.0)
    if CAPS:
        g *= slope(z, softcap)
    return g

"""RMSNorm beside a gate in Triton, forward and backward: rows on chip.

Kernels see a tensor as (n_rows, groups, H). A program has whole groups of some rows, all with the same place in their
rows, and so the same part of the weight. It reads each element once. Forward writes the result, backward adds up the
gradient of the weight in each lane and writes one row of sums for each program; ``add_sums`` adds these. There are no
atomics: the same input gives the same bits.

Common to both kernels:

- The arithmetic is in float32 and rounded once.
- Tensors are made contiguous if they are not. H is passed as ``size * UNIT``, as in ``_norm.py``.
- Offsets of rows are 64-bit.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.ops.norms.arguments import GatedRmsNormArgs, GatedRmsNormGradArgs
from fusedops_triton._jit._bias import add_sums, rounded, unit
from fusedops_triton._jit._common import read, read_evicting, scalar, widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.gated._gated import logistic, times
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div
from fusedops_triton.norms._norm import columns_of, ready
from fusedops_triton.norms._norm_settings import gated_norm_plan, gated_norm_sums


class GatedNorm(NamedTuple):
    """The options of a call."""

    gate_first: bool
    silu: bool
    groups: int
    offset: float


# ---------------------------------------------------------------------------------------------------------- launchers


def gated_rms_norm(a: GatedRmsNormArgs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the op for any rank, strides and dtypes."""
    options = GatedNorm(a.gate_first, a.activation == "silu", a.groups, a.offset)
    return gated_norm_forward(a.x, a.gate, a.weight, a.eps, options, save)


def gated_rms_norm_backward(a: GatedRmsNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, gate and weight in one pass, and the sums of the weight's in a second one."""
    options = GatedNorm(a.gate_first, a.activation == "silu", a.groups, a.offset)
    return gated_norm_backward(a.grad, a.x, a.gate, a.rstd, a.weight, options, a.needs)


def gated_norm_forward(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, options: GatedNorm, save: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute y, (..., H) in the dtype of x, and rstd, (..., groups), or None without ``save``; both contiguous.

    Args:
        x: (..., H), float16, bfloat16 or float32, any strides.
        gate: (..., H), any of these dtypes, any strides.
        weight: (H,), any of these dtypes; or None.
        eps: at least 0.
        options: of the call.
        save: True also returns rstd.
    """
    shape = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = torch.empty((*shape[:-1], options.groups), dtype=torch.float32, device=x.device) if save else None
    if y.numel() == 0:
        return y, None if rstd is None else rstd.fill_(float("nan"))  # of rows without columns
    sizes = (shape[:-1].numel(), shape[-1], max(x.element_size(), gate.element_size()))
    launch = _forward_launch(*sizes, options._replace(offset=float(options.offset != 0)))
    numbers = (float(eps), float(options.offset))
    launch(y, y, rstd, ready(x), ready(gate), ready(weight), *numbers)
    return y, rstd


def gated_norm_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    options: GatedNorm,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, gate and weight, contiguous, in their dtypes; None for one that is not wanted.

    Args:
        grad: (..., H), the gradient of y, any strides.
        x: as in the forward.
        gate: as in the forward.
        rstd: (..., groups), from the forward.
        weight: as in the forward.
        options: of the call.
        needs: the gradients to compute.
    """
    results = [
        torch.empty(each.shape, dtype=each.dtype, device=each.device) if each is not None and need else None
        for each, need in zip((x, gate, weight), needs)
    ]
    dx, dgate, dweight = results
    if x.numel() == 0 or (dx is None and dgate is None and dweight is None):
        return dx, dgate, None if dweight is None else dweight.zero_()
    widest = max(x.element_size(), gate.element_size(), grad.element_size())
    sizes = (x.shape[:-1].numel(), x.shape[-1], widest)
    launch, parts = _backward_launch(*sizes, dweight is not None, options._replace(offset=0.0))
    sums = dweight
    if dweight is not None and parts > 1:
        sums = torch.empty((parts, dweight.numel()), dtype=torch.float32, device=x.device)
    inputs = (ready(grad), ready(x), ready(gate), ready(rstd), ready(weight))
    launch(x, dx, dgate, sums, *inputs, float(options.offset))
    if dweight is not None and sums is not None and sums is not dweight:
        add_sums(dweight, sums)
    return dx, dgate, dweight


@cached_by_layout
def _forward_launch(n_rows: int, columns: int, widest: int, options: GatedNorm) -> Launch:
    """Return the launch for (n_rows, columns). options: with an offset of 0, or 1 for any other."""
    size = columns // options.groups
    unit_h, setting = unit(size), gated_norm_plan(size, widest)
    constants = {
        "GATE_FIRST": options.gate_first, "SILU": options.silu, "OFFSET": options.offset != 0, "UNIT": unit_h,
        "EVEN": size == setting.block and n_rows % setting.rows == 0, "ROWS": setting.rows, "BLOCK": setting.block,
    }  # fmt: skip
    grid = (ceil_div(n_rows, setting.rows), options.groups)
    return Launch(_gated_norm_forward, grid, (n_rows, size // unit_h, options.groups), constants, setting.warps)


@cached_by_layout
def _backward_launch(n_rows: int, columns: int, widest: int, sums: bool, options: GatedNorm) -> tuple[Launch, int]:
    """Return the launch for (n_rows, columns), and its rows of sums. sums: the gradient of the weight is wanted."""
    size = columns // options.groups
    unit_h, setting = unit(size), gated_norm_sums(n_rows, size, options.groups, widest, sums, options.gate_first)
    constants = {
        "GATE_FIRST": options.gate_first, "SILU": options.silu, "UNIT": unit_h, "X_AGAIN": setting.again[0],
        "EVEN": size == setting.block, "WHOLE": n_rows % setting.rows == 0, "ROWS": setting.rows,
        "BLOCK": setting.block,
    }  # fmt: skip
    parts = ceil_div(n_rows, setting.steps * setting.rows)
    sizes = (n_rows, size // unit_h, options.groups, setting.steps)
    grid = (parts, options.groups)
    return Launch(_gated_norm_backward, grid, sizes, constants, setting.warps, setting.registers), parts


# ------------------------------------------------------------------------------------------------------------ kernels
# Triton does not specialise on sizes: UNIT gives the compiler the alignment.


@profiled(do_not_specialize=["eps", "offset", "n_rows", "size", "groups"])
def _gated_norm_forward(
    y_ptr, rstd_ptr, x_ptr, gate_ptr, weight_ptr, eps, offset, n_rows, size, groups,
    GATE_FIRST: tl.constexpr, SILU: tl.constexpr, OFFSET: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one group of ROWS rows. Grid (cdiv(n_rows, ROWS), groups); H = size * UNIT <= BLOCK.

    y_ptr, x_ptr, gate_ptr: (n_rows, groups, H). rstd_ptr: (n_rows, groups), or None. weight_ptr: (groups, H), or None.
    eps, offset: see ``scalar``. OFFSET: False: offset is 0. EVEN: H = BLOCK, and n_rows is a multiple of ROWS.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1).to(tl.int64)
    col = tl.arange(0, BLOCK)
    in_row, width = columns_of(col, size, UNIT, EVEN, BLOCK)
    inside = in_row[None, :]
    if ROWS > 1 and not EVEN:  # else the grid has no program without a row
        inside = inside & (row < n_rows)[:, None]
    index = row * groups + group
    at = index[:, None] * width + col[None, :]
    rows = read(x_ptr + at, inside)
    act, _ = activation(read(gate_ptr + at, inside), SILU)
    if GATE_FIRST:
        rows *= act
    rstd = tl.rsqrt(tl.sum(rows * rows, axis=1) / width.to(tl.float32) + scalar(eps))
    if rstd_ptr is not None:
        tl.store(rstd_ptr + index, rstd, mask=row < n_rows)
    y = rows * rstd[:, None]
    if weight_ptr is not None:
        factor = read(weight_ptr + group * width + col, in_row)
        if OFFSET:
            factor += scalar(offset)
        y *= factor[None, :]
    if not GATE_FIRST:
        y *= act
    tl.store(y_ptr + at, rounded(y, y_ptr), mask=inside)


@profiled(do_not_specialize=["offset", "n_rows", "size", "groups", "steps"])
def _gated_norm_backward(
    dx_ptr, dgate_ptr, dweight_ptr, grad_ptr, x_ptr, gate_ptr, rstd_ptr, weight_ptr, offset,
    n_rows, size, groups, steps,
    GATE_FIRST: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr, X_AGAIN: tl.constexpr,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one group of steps * ROWS rows, or of what is left. Grid (parts, groups); H = size * UNIT <= BLOCK.

    dx_ptr, dgate_ptr: (n_rows, groups, H), or None. dweight_ptr: (parts, groups, H), the sums over this program's rows,
    or None. grad_ptr, x_ptr, gate_ptr: (n_rows, groups, H). rstd_ptr: (n_rows, groups). weight_ptr: (groups, H), or
    None. offset: see ``scalar``. X_AGAIN: with the gate first, x is read again after the sum over a row, from a cache.
    EVEN: H = BLOCK. WHOLE: n_rows is a multiple of ROWS.
    """
    group = tl.program_id(1).to(tl.int64)
    col = tl.arange(0, BLOCK)
    in_row, width = columns_of(col, size, UNIT, EVEN, BLOCK)
    share = 1.0 / width.to(tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + group * width + col, mask=in_row, other=0.0)
        factor = (widened(weight) + scalar(offset))[None, :]
    # each lane adds up its own elements; one reduction over rows at the end
    dweight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * (steps * ROWS)
    end = tl.minimum(first + steps * ROWS, n_rows)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = in_row[None, :] & tl.full([ROWS, 1], 1, tl.int1)
        if not WHOLE:
            inside = inside & (row < end)[:, None]
        index = row * groups + group
        at = index[:, None] * width + col[None, :]
        x = read(x_ptr + at, inside)
        act, slope = activation(read(gate_ptr + at, inside), SILU)
        grad = read(grad_ptr + at, inside)
        rstd = tl.load(rstd_ptr + index, mask=row < n_rows, other=0.0)[:, None]
        scaled = grad  # the gradient of the normalized numbers, without the gate
        if weight_ptr is not None:
            scaled = grad * factor
        if GATE_FIRST:
            normal, m = x * act * rstd, scaled
            if dweight_ptr is not None:
                dweight += grad * normal
        else:
            normal, m = x * rstd, scaled * act
            if dweight_ptr is not None:
                dweight += grad * act * normal
        of_act = scaled * normal
        if dx_ptr is not None or (GATE_FIRST and dgate_ptr is not None):
            product = tl.sum(m * normal, axis=1) * share
            if X_AGAIN:
                x = read_evicting(x_ptr + at, inside, "evict_first")  # with a policy, or it would be the same read
                normal = x * act * rstd
            drow = (m - normal * product[:, None]) * rstd
            dx = drow
            if GATE_FIRST:
                dx, of_act = drow * act, drow * x
            if dx_ptr is not None:
                tl.store(dx_ptr + at, rounded(dx, dx_ptr), mask=inside)
        if dgate_ptr is not None:
            tl.store(dgate_ptr + at, rounded(of_act * slope, dgate_ptr), mask=inside)
    if dweight_ptr is not None:
        to = (tl.program_id(0).to(tl.int64) * groups + group) * width + col
        tl.store(dweight_ptr + to, rounded(tl.sum(dweight, axis=0), dweight_ptr), mask=in_row)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def activation(gate, SILU: tl.constexpr):
    """Compute the activation of a gate, silu or sigmoid, and its derivative. silu of -inf is 0."""
    s, rest = logistic(gate)
    act, slope = s, s * rest
    if SILU:
        act = times(gate, s)
        slope = s + times(act, rest)
    return act, slope

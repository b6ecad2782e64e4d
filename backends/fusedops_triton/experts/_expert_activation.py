"""The activation of the experts in Triton, forward and backward, on rows that are sorted by expert.

    forward     A program reads a tile of up-projections once. The bias is added here, since the products do not have
                it. Where the up-projections are saved, those that changed are written: all with a bias, else those of
                rows without an expert, which are 0.
    backward    A program computes whole rows: the activation again, the gradient of the up-projections, and the
                gradient of the weight of each row, which is a sum over it.

All arithmetic is in float32, and rounded once. Gate and up are the halves of a row, or its
even and odd elements.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fusedops.ops.experts.formulas import Activation
from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import read, scalar, widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.experts._expert_rows import Route
from fusedops_triton.gated._gated import activated, gradients
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import (
    FLAT_PER_THREAD,
    FLAT_THREADS,
    ceil_div,
    gated_columns,
    power_of_two,
    warps_for,
)

_FUNCTIONS = {
    **{"swiglu": "swish", "geglu": "erf", "geglu_tanh": "tanh"},
    **{"silu": "swish", "gelu": "erf", "gelu_tanh": "tanh", "relu": "relu", "relu2": "relu2"},
}


class Kind(NamedTuple):
    """The constexprs of an activation: its function, and where gate and up are in a row."""

    function: str
    layout: str  # "halves", "pairs", or "gate": there is no up


def kind_of(act: Activation) -> tuple[Kind, tuple[float, ...]]:
    """Return the constexprs of an activation, and its numbers."""
    layout = ("pairs" if act.interleaved else "halves") if act.gated else "gate"
    function, numbers = _FUNCTIONS[act.name], (0.0, 1.0, 0.0)
    if act.name == "swiglu":
        function = "swish" if act.limit is None else "clamped"
        numbers = (act.limit or 0.0, act.alpha, act.offset)
    return Kind(function, layout), tuple([float(number) for number in numbers])


# ---------------------------------------------------------------------------------------------------------- launchers


def activation_forward(h: Tensor, bias: Tensor | None, of: Route, act: Activation, save: bool) -> Tensor:
    """Return the activation of ``h + bias``, (S, I), the dtype of h.

    Args:
        h: (S, 2I or I), contiguous. With ``save``, the result of ``h + bias``, and 0 for rows without an expert.
        bias: (E, 2I or I), contiguous, or None.
        of: the route.
        act: the activation.
        save: True writes h.
    """
    kind, numbers = kind_of(act)
    a = h.new_empty((h.shape[0], h.shape[1] // 2 if act.gated else h.shape[1]))
    if a.numel():
        launch = _forward_launch(*a.shape, of.ends.shape[0], a.element_size(), kind, save)
        launch(a, a, h, bias, of.group, *numbers)
    return a


@cached_by_layout
def _forward_launch(n_rows: int, size: int, experts: int, element_size: int, kind: Kind, save: bool) -> Launch:
    per_thread = FLAT_PER_THREAD[element_size] // 2
    tile = per_thread * FLAT_THREADS
    cols = gated_columns(size, tile, element_size)
    rows = min(tile // cols, power_of_two(n_rows))
    unit_i = unit(size)
    constants = {
        "KIND": kind.function, "LAYOUT": kind.layout, "SAVE": save, "UNIT": unit_i, "ROWS": rows, "COLS": cols,
    }  # fmt: skip
    grid = (ceil_div(size, cols) * ceil_div(n_rows, rows),)
    return Launch(_forward, grid, (n_rows, experts, size // unit_i), constants, warps_for(rows * cols, per_thread))


class Gradients(NamedTuple):
    """The results of the backward; None for one that is not wanted."""

    h: Tensor | None  # (S, 2I or I): the gradient of the up-projections
    a: Tensor | None  # (S, I): the activation
    weights: Tensor | None  # (T, K)


def activation_backward(
    da: Tensor | None,
    h: Tensor,
    grad: Tensor | None,
    down_bias: Tensor | None,
    weights: Tensor,
    of: Route,
    act: Activation,
    wanted: tuple[bool, bool, bool],
) -> Gradients:
    """Compute the gradients of h and of the weights of the rows, and the activation again.

    Args:
        da: (S, I), contiguous, the gradient of the activation of rows whose weight is 1; or None if neither gradient is
            wanted.
        h: (S, 2I or I), contiguous, with the bias.
        grad: (S, H), contiguous, the gradient of the output of each row; read with ``down_bias`` alone.
        down_bias: (E, H), contiguous, or None.
        weights: (T, K), contiguous.
        of: the route.
        act: the activation.
        wanted: the results to compute.
    """
    kind, numbers = kind_of(act)
    size = h.shape[1] // 2 if act.gated else h.shape[1]
    dh, a = h.new_empty(h.shape) if wanted[0] else None, h.new_empty((h.shape[0], size)) if wanted[1] else None
    dweights = weights.new_empty(weights.shape) if wanted[2] else None
    bias = down_bias if wanted[2] else None
    launch = _backward_launch(
        h.shape[0], size, of.ends.shape[0], 0 if bias is None else bias.shape[1], h.element_size(), kind
    )
    launch(h, dh, a, dweights, da, h, grad, bias, weights, of.order, of.group, *numbers)
    return Gradients(dh, a, dweights)


@cached_by_layout
def _backward_launch(n_rows: int, size: int, experts: int, width: int, element_size: int, kind: Kind) -> Launch:
    per_thread = FLAT_PER_THREAD[element_size] // 2
    tile = per_thread * FLAT_THREADS
    cols = gated_columns(max(size, 1), tile, element_size)
    rows = min(tile // cols, power_of_two(n_rows))
    unit_i, unit_h = unit(size) or 1, unit(width) or 1
    constants = {
        "KIND": kind.function, "LAYOUT": kind.layout, "UNIT": unit_i, "UNIT_H": unit_h, "ROWS": rows, "COLS": cols,
    }  # fmt: skip
    sizes = (n_rows, experts, size // unit_i, width // unit_h)
    return Launch(_backward, (ceil_div(n_rows, rows),), sizes, constants, warps_for(rows * cols, per_thread))


# ------------------------------------------------------------------------------------------------------ jit functions


@profiled(do_not_specialize=["limit", "alpha", "offset", "n_rows", "size"])
def _forward(
    a_ptr, h_ptr, bias_ptr, group_ptr, limit, alpha, offset, n_rows, experts, size,
    KIND: tl.constexpr, LAYOUT: tl.constexpr, SAVE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS * COLS elements. Grid (cdiv(I, COLS) * cdiv(n_rows, ROWS),), I = size * UNIT."""
    columns = size.to(tl.int64) * UNIT
    tiles = ((columns + COLS - 1) // COLS).to(tl.uint32)
    program = tl.program_id(0).to(tl.uint32)
    row = (program // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = (program % tiles).to(tl.int64) * COLS
    e = tl.load(group_ptr + row, row < n_rows, experts)
    known, there = e < experts, row < n_rows
    gate, up = _read(h_ptr, row, known, first, columns, LAYOUT, COLS)
    if bias_ptr is not None:
        gate_bias, up_bias = _read(bias_ptr, e.to(tl.int64), known, first, columns, LAYOUT, COLS)
        gate += gate_bias
        if LAYOUT != "gate":
            up += up_bias
    if SAVE:
        if bias_ptr is None:
            there = there & ~known
        write_rows(h_ptr, gate, up, row, there, first, columns, LAYOUT, COLS)
    a = activated_rows(gate, up, limit, alpha, offset, KIND)
    col = first + tl.arange(0, COLS)
    inside = known[:, None] & (col < columns)[None, :]
    tl.store(a_ptr + row[:, None] * columns + col[None, :], rounded(a, a_ptr), inside)


@profiled(do_not_specialize=["limit", "alpha", "offset", "n_rows", "size", "width"])
def _backward(
    dh_ptr, a_ptr, dweights_ptr, da_ptr, h_ptr, grad_ptr, bias_ptr, weights_ptr, order_ptr, group_ptr,
    limit, alpha, offset, n_rows, experts, size, width,
    KIND: tl.constexpr, LAYOUT: tl.constexpr, UNIT: tl.constexpr, UNIT_H: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows. Grid (cdiv(n_rows, ROWS),). I = size * UNIT, H = width * UNIT_H."""
    columns = size.to(tl.int64) * UNIT
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    routed = tl.load(order_ptr + row, row < n_rows, 0)
    e = tl.load(group_ptr + row, row < n_rows, experts)
    known = e < experts
    weight = tl.load(weights_ptr + routed, known, 0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, size * UNIT, COLS):
        gate, up = _read(h_ptr, row, known, first, columns, LAYOUT, COLS)
        col = first + tl.arange(0, COLS)
        inside = known[:, None] & (col < columns)[None, :]
        at = row[:, None] * columns + col[None, :]
        if a_ptr is not None or dweights_ptr is not None:
            a = activated_rows(gate, up, limit, alpha, offset, KIND)
            if a_ptr is not None:
                tl.store(a_ptr + at, rounded(a, a_ptr), inside)
            if dweights_ptr is not None:
                total += tl.where(inside, a * read(da_ptr + at, inside), 0.0)
        if dh_ptr is not None:
            da = read(da_ptr + at, inside) * weight[:, None]
            dgate, dup = _gradients(da, gate, up, limit, alpha, offset, KIND)
            write_rows(dh_ptr, dgate, dup, row, known, first, columns, LAYOUT, COLS)
    if dweights_ptr is not None:
        if bias_ptr is not None:
            wide = width.to(tl.int64) * UNIT_H
            for first in range(0, width * UNIT_H, COLS):
                col = first + tl.arange(0, COLS)
                inside = known[:, None] & (col < wide)[None, :]
                grad = read(grad_ptr + row[:, None] * wide + col[None, :], inside)
                bias = tl.load(bias_ptr + e.to(tl.int64)[:, None] * wide + col[None, :], inside, 0.0)
                total += tl.where(inside, grad * widened(bias), 0.0)
        tl.store(dweights_ptr + routed, rounded(tl.sum(total, 1), dweights_ptr), row < n_rows)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def _read(ptr, row, known, first, columns, LAYOUT: tl.constexpr, COLS: tl.constexpr):
    """Return gate and up of some rows from column ``first`` on, float32; 0 for rows that are not known."""
    if LAYOUT == "pairs":
        both = 2 * first + tl.arange(0, 2 * COLS)
        inside = known[:, None] & (both < 2 * columns)[None, :]
        packed = read(ptr + row[:, None] * (2 * columns) + both[None, :], inside)
        return tl.split(tl.reshape(packed, [packed.shape[0], COLS, 2]))
    col = first + tl.arange(0, COLS)
    inside = known[:, None] & (col < columns)[None, :]
    if LAYOUT == "gate":
        gate = read(ptr + row[:, None] * columns + col[None, :], inside)
        return gate, tl.full(gate.shape, 1.0, tl.float32)
    at = row[:, None] * (2 * columns) + col[None, :]
    gate = read(ptr + at, inside)
    return gate, read(ptr + columns + at, inside)


@triton.jit
def write_rows(ptr, gate, up, row, known, first, columns, LAYOUT: tl.constexpr, COLS: tl.constexpr):
    """Write gate and up of some rows in the layout that ``_read`` reads."""
    if LAYOUT == "pairs":
        both = 2 * first + tl.arange(0, 2 * COLS)
        inside = known[:, None] & (both < 2 * columns)[None, :]
        packed = tl.reshape(tl.join(gate, up), [gate.shape[0], 2 * COLS])
        tl.store(ptr + row[:, None] * (2 * columns) + both[None, :], rounded(packed, ptr), inside)
    else:
        col = first + tl.arange(0, COLS)
        inside = known[:, None] & (col < columns)[None, :]
        if LAYOUT == "gate":
            tl.store(ptr + row[:, None] * columns + col[None, :], rounded(gate, ptr), inside)
        else:
            at = row[:, None] * (2 * columns) + col[None, :]
            tl.store(ptr + at, rounded(gate, ptr), inside)
            tl.store(ptr + columns + at, rounded(up, ptr), inside)


@triton.jit
def activated_rows(gate, up, limit, alpha, offset, KIND: tl.constexpr):
    """Compute the activation."""
    if KIND == "relu" or KIND == "relu2":
        positive = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive if KIND == "relu" else positive * positive
    return activated(gate, up, scalar(limit), scalar(alpha), scalar(offset), KIND)


@triton.jit
def _gradients(da, gate, up, limit, alpha, offset, KIND: tl.constexpr):
    """Compute the gradients of gate and up; the latter is without a meaning where there is no up."""
    if KIND == "relu" or KIND == "relu2":
        slope = tl.where(gate > 0, 1.0, 0.0)
        if KIND == "relu2":
            slope = 2.0 * tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return da * slope, da * slope
    return gradients(da, gate, up, scalar(limit), scalar(alpha), scalar(offset), KIND)

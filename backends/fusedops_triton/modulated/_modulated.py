"""Modulated norms and gated residuals in Triton: the forward. ``_modulated_backward.py`` has the backward.

Kernels see rows as (batches, tokens, H). One kernel computes all three ops: a pointer that is None leaves out the sum,
the norm, or an argument of either. What repeats over rows is read by its strides, and is in a cache for most rows.

- The arithmetic is in float32 and rounded once; the sum is rounded before it is normalized.
- Tensors of the size of the rows are made contiguous if they are not. A scale, shift or gate is copied only where its
  columns are not next to each other.
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

from fusedops.ops.modulated.arguments import LAYER, TANH, GatedAddModulatedNormArgs, ModulatedNormArgs
from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import read, scalar
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div
from fusedops_triton.norms._norm import columns_of, ready
from fusedops_triton.norms._norm_settings import gated_norm_plan


class Repeated(NamedTuple):
    """A scale, shift or gate, and its elements from one batch and token to the next, 0 where it repeats."""

    tensor: Tensor | None
    batch: int
    token: int


class Options(NamedTuple):
    """The options of a call that kernels are compiled for."""

    centered: bool
    tanh: bool
    gate_by_row: bool


def repeated(tensor: Tensor | None) -> Repeated:
    """Return what repeats over rows as kernels take it."""
    if tensor is None:
        return Repeated(None, 0, 0)
    if tensor.is_neg() or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
        tensor = tensor.resolve_neg().contiguous()
    shape, strides = (1, 1, *tensor.shape)[-3:], (0, 0, *tensor.stride())[-3:]
    return Repeated(tensor, strides[0] if shape[0] > 1 else 0, strides[1] if shape[1] > 1 else 0)


def options_of(kind: str, activation: str, gate: Tensor | None, columns: int) -> Options:
    """Return the options of a call."""
    return Options(kind == LAYER, activation == TANH, gate is not None and gate.shape[-1] != columns)


# ---------------------------------------------------------------------------------------------------------- launchers


def modulated_norm(a: ModulatedNormArgs, save: bool) -> tuple[Tensor | None, ...]:
    """Compute the op for any strides and dtypes."""
    z, _, mean, rstd = forward(a.x, None, None, "none", a, save)
    return z, mean, rstd


def gated_add(residual: Tensor, y: Tensor, gate: Tensor, activation: str) -> Tensor | None:
    """Compute the op for any strides and dtypes."""
    return forward(residual, y, gate, activation, None, False)[1]


def gated_add_modulated_norm(a: GatedAddModulatedNormArgs, save: bool) -> tuple[Tensor | None, ...]:
    """Compute the op for any strides and dtypes."""
    norm = ModulatedNormArgs(a.residual, a.scale, a.shift, a.weight, a.bias, a.eps, a.kind, a.offset)
    return forward(a.residual, a.y, a.gate, a.activation, norm, save)


def forward(
    rows: Tensor, y: Tensor | None, gate: Tensor | None, activation: str, norm: ModulatedNormArgs | None, save: bool
) -> tuple[Tensor | None, ...]:
    """Compute z, s, the mean and rstd, each None where the arguments do not give it.

    Args:
        rows: (B, S, H), x or the residual, any strides.
        y: the same shape, or None.
        gate: of y.
        activation: of the gate.
        norm: the arguments of the norm, whose x is not read; or None.
        save: True also returns the saved values, (B, S).
    """
    shape = rows.shape
    s = None if y is None else torch.empty_like(rows, memory_format=torch.contiguous_format)
    z = None if norm is None else torch.empty_like(rows, memory_format=torch.contiguous_format)
    rstd = torch.empty(shape[:-1], dtype=torch.float32, device=rows.device) if save else None
    mean = None if rstd is None else torch.empty_like(rstd)
    kind = LAYER if norm is None else norm.kind
    if rows.numel() == 0:
        if mean is not None and rstd is not None:  # of rows without columns
            mean.fill_(float("nan") if kind == LAYER else 0.0)
            rstd.fill_(float("nan"))
        return z, s, mean, rstd
    scale, shift = (repeated(None if norm is None else each) for each in ((norm and norm.scale), (norm and norm.shift)))
    of_gate = repeated(gate)
    launch = _forward_launch(
        tuple(shape), rows.element_size(), options_of(kind, activation, gate, shape[-1]), scale[1:], shift[1:],
        of_gate[1:],
    )  # fmt: skip
    weight, bias = (None, None) if norm is None else (ready(norm.weight), ready(norm.bias))
    numbers = (0.0, 0.0) if norm is None else (float(norm.eps), float(norm.offset))
    launch(
        rows, z, s, mean, rstd, ready(rows), ready(y), weight, bias, scale.tensor, shift.tensor, of_gate.tensor,
        *numbers,
    )  # fmt: skip
    return z, s, mean, rstd


@cached_by_layout
def _forward_launch(
    shape: tuple[int, int, int],
    widest: int,
    options: Options,
    scale: tuple[int, int],
    shift: tuple[int, int],
    gate: tuple[int, int],
) -> Launch:
    """Return the launch for (B, S, H); scale, shift, gate: their strides of batches and tokens."""
    batches, tokens, size = shape
    unit_h, setting = unit(size), gated_norm_plan(size, widest)
    n_rows = batches * tokens
    constants = {
        "CENTER": options.centered, "TANH": options.tanh, "GATE_BY_ROW": options.gate_by_row, "UNIT": unit_h,
        "EVEN": size == setting.block and n_rows % setting.rows == 0, "ROWS": setting.rows, "BLOCK": setting.block,
    }  # fmt: skip
    sizes = (n_rows, tokens, size // unit_h, *scale, *shift, *gate)
    return Launch(_modulated_forward, (ceil_div(n_rows, setting.rows),), sizes, constants, setting.warps)


# ------------------------------------------------------------------------------------------------------------ kernels

STRIDES = ["scale_b", "scale_t", "shift_b", "shift_t", "gate_b", "gate_t"]


@profiled(do_not_specialize=["eps", "offset", "n_rows", "tokens", "size"])
def _modulated_forward(
    z_ptr, s_ptr, mean_ptr, rstd_ptr, x_ptr, y_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, gate_ptr,
    eps, offset, n_rows, tokens, size, scale_b, scale_t, shift_b, shift_t, gate_b, gate_t,
    CENTER: tl.constexpr, TANH: tl.constexpr, GATE_BY_ROW: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ROWS whole rows. Grid (cdiv(n_rows, ROWS),); H = size * UNIT <= BLOCK.

    z_ptr: (n_rows, H), or None for no norm. s_ptr, y_ptr: the same, or None for no sum. mean_ptr, rstd_ptr: (n_rows,),
    or None. x_ptr: (n_rows, H). weight_ptr, bias_ptr: (H,), or None. scale_ptr, shift_ptr, gate_ptr: rows by their
    strides of batches and tokens, or None. eps, offset: see ``scalar``. EVEN: H = BLOCK, and n_rows is a multiple of
    ROWS.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    batch, token = row // tokens, row % tokens
    col = tl.arange(0, BLOCK)
    in_row, width = columns_of(col, size, UNIT, EVEN, BLOCK)
    inside = in_row[None, :]
    if ROWS > 1 and not EVEN:  # else the grid has no program without a row
        inside = inside & (row < n_rows)[:, None]
    at = row[:, None] * width + col[None, :]
    s = read(x_ptr + at, inside)
    if s_ptr is not None:
        gate = gate_of(gate_ptr, batch * gate_b + token * gate_t, row < n_rows, col, inside, TANH, GATE_BY_ROW)
        total = rounded(s + read(y_ptr + at, inside) * gate, s_ptr)
        tl.store(s_ptr + at, total, mask=inside)
        s = total.to(tl.float32)
    if z_ptr is not None:
        n = width.to(tl.float32)
        mean = tl.zeros([ROWS], dtype=tl.float32)
        if CENTER:
            mean = tl.sum(s, axis=1) / n
            s = tl.where(inside, s - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(s * s, axis=1) / n + scalar(eps))
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, mask=row < n_rows)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + row, rstd, mask=row < n_rows)
        z = affine(s * rstd[:, None], weight_ptr, bias_ptr, col, in_row)
        z *= read(scale_ptr + (batch * scale_b + token * scale_t)[:, None] + col[None, :], inside) + scalar(offset)
        if shift_ptr is not None:
            z += read(shift_ptr + (batch * shift_b + token * shift_t)[:, None] + col[None, :], inside)
        tl.store(z_ptr + at, rounded(z, z_ptr), mask=inside)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def gate_of(gate_ptr, start, is_row, col, inside, TANH: tl.constexpr, BY_ROW: tl.constexpr):
    """Return the activation of the gate of some rows, (ROWS, BLOCK), or (ROWS, 1) where it is BY_ROW."""
    if BY_ROW:
        of_row = read(gate_ptr + start, is_row)
        if TANH:
            of_row = tanh(of_row)
        return of_row[:, None]
    gate = read(gate_ptr + start[:, None] + col[None, :], inside)
    if TANH:
        gate = tanh(gate)
    return gate


@triton.jit
def affine(normal, weight_ptr, bias_ptr, col, in_row):
    """Return ``normal * weight + bias``, where there are a weight and a bias."""
    if weight_ptr is not None:
        normal *= read(weight_ptr + col, in_row)[None, :]
    if bias_ptr is not None:
        normal += read(bias_ptr + col, in_row)[None, :]
    return normal


@triton.jit
def tanh(x):
    """Return tanh(x): by exp(-2 * abs(x)) from 0.25 on, and below by its series, whose error is 1e-8 of itself."""
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    square = x * x
    small = -0.05396825397 + square * (0.02186948854 - square * 0.008863235530)
    small = size + size * (square * (-0.3333333333 + square * (0.1333333333 + square * small)))
    result = tl.where(size < 0.25, small, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0.0, -result, result)

"""The backward of the modulated norms and gated residuals in Triton. ``_modulated.py`` has what is common.

    rows     A program holds whole rows, writes the gradients of the rows and of what has a row for each token, and the
             two means of each row that the next kernel needs.
    sums     A program adds up some columns of a part of the tokens of one batch, for the gradients of what repeats over
             tokens: it reads the inputs again. torch adds the parts.

There are no atomics: the same input gives the same bits.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.ops.modulated.arguments import LAYER, GatedAddModulatedNormGradArgs, ModulatedNormGradArgs
from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import read, scalar
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div
from fusedops_triton.modulated._modulated import Options, affine, gate_of, options_of, repeated
from fusedops_triton.norms._norm import columns_of, ready
from fusedops_triton.norms._norm_settings import gated_norm_sums

_TILE = (8, 128)  # rows and columns that a program of the sums holds at a time
_PART = 256  # rows of a part, at most

# ---------------------------------------------------------------------------------------------------------- launchers


def modulated_norm_backward(a: ModulatedNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, scale, shift, weight and bias."""
    needs = (a.needs[0], False, False, *a.needs[1:])
    found = backward(a.grad, None, a.x, None, None, "none", a, needs)
    return found[0], *found[3:]


def gated_add_backward(
    grad: Tensor, y: Tensor, gate: Tensor, activation: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of y and gate."""
    return backward(None, grad, grad, y, gate, activation, None, (False, *needs, False, False, False, False))[1:3]


def gated_add_modulated_norm_backward(a: GatedAddModulatedNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of residual, y, gate, scale, shift, weight and bias."""
    of_norm = (a.s, a.mean, a.rstd, a.scale, a.shift, a.weight, a.bias, a.kind, a.offset)
    norm = ModulatedNormGradArgs(a.grad_z, *of_norm, a.needs[2:])
    return backward(a.grad_z, a.grad_s, a.s, a.y, a.gate, a.activation, norm, a.needs)


def backward(
    grad_z: Tensor | None,
    grad_s: Tensor | None,
    s: Tensor,
    y: Tensor | None,
    gate: Tensor | None,
    activation: str,
    norm: ModulatedNormGradArgs | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of rows, y, gate, scale, shift, weight and bias, contiguous, in their dtypes.

    Args:
        grad_z: (B, S, H), the gradient of z, or None without a norm.
        grad_s: the same of s, or None without a gate.
        s: (B, S, H), what was normalized; its values are read where there is a norm.
        y: the same shape, or None.
        gate: of y.
        activation: of the gate.
        norm: the arguments of the norm's backward, or None.
        needs: the gradients to compute; the others are None.
    """
    scale, shift, weight, bias = (None,) * 4 if norm is None else (norm.scale, norm.shift, norm.weight, norm.bias)
    tensors = (s, y, gate, scale, shift, weight, bias)
    wanted = [each if need else None for each, need in zip(tensors, needs)]
    if s.numel() == 0 or all(each is None for each in wanted):
        return tuple(None if each is None else _zeros(each) for each in wanted)
    batches, tokens, columns = s.shape
    options = options_of(LAYER if norm is None else norm.kind, activation, gate, columns)
    ds, dy = (None if each is None else _empty(each) for each in wanted[:2])
    # by token: what has a row for each, and a gate with one number for each
    by_token = [
        None if each is None or not (_has_tokens(each) or each.shape[-1] != columns)
        else torch.empty((batches, tokens, each.shape[-1]), dtype=torch.float32, device=s.device)
        for each in wanted[2:5]
    ]  # fmt: skip
    sums = [each if of is None else None for each, of in zip(wanted[2:], (*by_token, None, None))]
    means = None
    if grad_z is not None and sums[0] is not None:  # the mean of m * normal and of m, of each row
        means = torch.empty((2, batches * tokens), dtype=torch.float32, device=s.device)
    of_scale, of_gate = repeated(scale), repeated(gate)
    inputs = (
        ready(grad_z), ready(grad_s), None if grad_z is None else ready(s), ready(y),
        None if norm is None or not options.centered else ready(norm.mean),
        None if norm is None else ready(norm.rstd), ready(weight), ready(bias), of_scale.tensor, of_gate.tensor,
        0.0 if norm is None else float(norm.offset),
    )  # fmt: skip
    key = (tuple(s.shape), s.element_size(), options, of_scale[1:], of_gate[1:])
    if ds is not None or dy is not None or means is not None or any(each is not None for each in by_token):
        of_rows = None if means is None else means[0]
        of_sum = None if means is None else means[1]
        dgate, dscale, dshift = by_token
        _rows_launch(*key)(s, ds, dy, dscale, dshift, dgate, of_rows, of_sum, *inputs)
    parts = _sums(sums, inputs, means, key)
    found = (*(part if token is None else token for part, token in zip(parts[:3], by_token)), *parts[3:])
    return ds, dy, *(None if out is None or of is None else _reduced(out, of) for out, of in zip(found, wanted[2:]))


def _sums(
    wanted: list[Tensor | None], inputs: tuple[object, ...], means: Tensor | None, key: tuple[Any, ...]
) -> list[Tensor | None]:
    """Return the sums over tokens of the gradients of gate, scale, shift, weight and bias, (B, 1, H) in float32."""
    if all(each is None for each in wanted):
        return [None] * 5
    (batches, tokens, columns), *_ = key
    count = ceil_div(tokens, _PART)
    like = next(each for each in wanted if each is not None)
    parts = [
        None if each is None else torch.empty((batches, count, columns), dtype=torch.float32, device=like.device)
        for each in wanted
    ]
    of_rows = None if means is None else means[0]
    of_sum = None if means is None else means[1]
    _sums_launch(*key)(like, *parts, of_rows, of_sum, *inputs)
    return [None if each is None else each.sum(1, keepdim=True) for each in parts]


def _has_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 3 and tensor.shape[1] > 1


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _reduced(result: Tensor, tensor: Tensor) -> Tensor:
    """Return a gradient, (B, 1 or S, H or 1), summed to the shape of its tensor, in its dtype."""
    return result.sum_to_size(tensor.shape).to(tensor.dtype)


@cached_by_layout
def _rows_launch(
    shape: tuple[int, int, int], widest: int, options: Options, scale: tuple[int, int], gate: tuple[int, int]
) -> Launch:
    """Return the launch of the rows' gradients."""
    batches, tokens, size = shape
    n_rows = batches * tokens
    unit_h, setting = unit(size), gated_norm_sums(n_rows, size, 1, widest, False)
    constants = {
        "CENTER": options.centered, "TANH": options.tanh, "GATE_BY_ROW": options.gate_by_row, "UNIT": unit_h,
        "EVEN": size == setting.block and n_rows % setting.rows == 0, "ROWS": setting.rows, "BLOCK": setting.block,
    }  # fmt: skip
    sizes = (n_rows, tokens, size // unit_h, *scale, *gate)
    return Launch(_modulated_backward_rows, (ceil_div(n_rows, setting.rows),), sizes, constants, setting.warps)


@cached_by_layout
def _sums_launch(
    shape: tuple[int, int, int], widest: int, options: Options, scale: tuple[int, int], gate: tuple[int, int]
) -> Launch:
    """Return the launch of the sums over tokens."""
    batches, tokens, size = shape
    unit_h, (rows, cols) = unit(size), _TILE
    constants = {
        "CENTER": options.centered, "TANH": options.tanh, "GATE_BY_ROW": options.gate_by_row, "UNIT": unit_h,
        "PART": _PART, "ROWS": rows, "COLS": cols,
    }  # fmt: skip
    grid = (ceil_div(size, cols), ceil_div(tokens, _PART), batches)
    return Launch(_modulated_backward_sums, grid, (tokens, size // unit_h, *scale, *gate), constants, 4)


# ------------------------------------------------------------------------------------------------------------ kernels


@profiled(do_not_specialize=["offset", "n_rows", "tokens", "size"])
def _modulated_backward_rows(
    ds_ptr, dy_ptr, dscale_ptr, dshift_ptr, dgate_ptr, product_ptr, center_ptr,
    grad_z_ptr, grad_s_ptr, s_ptr, y_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, scale_ptr, gate_ptr, offset,
    n_rows, tokens, size, scale_b, scale_t, gate_b, gate_t,
    CENTER: tl.constexpr, TANH: tl.constexpr, GATE_BY_ROW: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute ROWS whole rows. Grid (cdiv(n_rows, ROWS),); H = size * UNIT <= BLOCK.

    ds_ptr, dy_ptr: (n_rows, H), or None. dscale_ptr, dshift_ptr, dgate_ptr: the same in float32, by token; dgate_ptr
    (n_rows,) for a gate by row. product_ptr, center_ptr: (n_rows,), the means of m * normal and m, or None. grad_z_ptr,
    grad_s_ptr, s_ptr, y_ptr: (n_rows, H), or None. mean_ptr, rstd_ptr: (n_rows,), or None. The others as in
    _modulated_forward.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < n_rows
    batch, token = row // tokens, row % tokens
    col = tl.arange(0, BLOCK)
    in_row, width = columns_of(col, size, UNIT, EVEN, BLOCK)
    inside = in_row[None, :]
    if ROWS > 1 and not EVEN:
        inside = inside & is_row[:, None]
    at = row[:, None] * width + col[None, :]
    ds = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    if grad_s_ptr is not None:
        ds += read(grad_s_ptr + at, inside)
    if grad_z_ptr is not None:
        g = read(grad_z_ptr + at, inside)
        rstd = tl.load(rstd_ptr + row, mask=is_row, other=0.0)[:, None]
        normal = normal_of(s_ptr, mean_ptr, at, row, is_row, inside, rstd)
        if dshift_ptr is not None:
            tl.store(dshift_ptr + at, g, mask=inside)
        if dscale_ptr is not None:
            tl.store(dscale_ptr + at, g * affine(normal, weight_ptr, bias_ptr, col, in_row), mask=inside)
        start = batch * scale_b + token * scale_t
        m = g * (read(scale_ptr + start[:, None] + col[None, :], inside) + scalar(offset))
        if weight_ptr is not None:
            m *= read(weight_ptr + col, in_row)[None, :]
        n = width.to(tl.float32)
        product = tl.sum(m * normal, axis=1) / n
        center = tl.zeros([ROWS], dtype=tl.float32)
        if CENTER:
            center = tl.sum(m, axis=1) / n
        if product_ptr is not None:
            tl.store(product_ptr + row, product, mask=is_row)
            tl.store(center_ptr + row, center, mask=is_row)
        ds += (m - normal * product[:, None] - center[:, None]) * rstd
    if ds_ptr is not None:
        tl.store(ds_ptr + at, rounded(ds, ds_ptr), mask=inside)
    if y_ptr is not None:
        gate = gate_of(gate_ptr, batch * gate_b + token * gate_t, is_row, col, inside, TANH, GATE_BY_ROW)
        if dy_ptr is not None:
            tl.store(dy_ptr + at, rounded(ds * gate, dy_ptr), mask=inside)
        if dgate_ptr is not None:
            of_gate = ds * read(y_ptr + at, inside)
            if TANH:
                of_gate *= 1.0 - gate * gate
            if GATE_BY_ROW:
                tl.store(dgate_ptr + row, tl.sum(tl.where(inside, of_gate, 0.0), axis=1), mask=is_row)
            else:
                tl.store(dgate_ptr + at, of_gate, mask=inside)


@profiled(do_not_specialize=["offset", "tokens", "size"])
def _modulated_backward_sums(
    dgate_ptr, dscale_ptr, dshift_ptr, dweight_ptr, dbias_ptr, product_ptr, center_ptr,
    grad_z_ptr, grad_s_ptr, s_ptr, y_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, scale_ptr, gate_ptr, offset,
    tokens, size, scale_b, scale_t, gate_b, gate_t,
    CENTER: tl.constexpr, TANH: tl.constexpr, GATE_BY_ROW: tl.constexpr, UNIT: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Sum COLS columns of PART tokens of a batch. Grid (cdiv(H, COLS), cdiv(tokens, PART), batches).

    dgate_ptr, dscale_ptr, dshift_ptr, dweight_ptr, dbias_ptr: (batches, cdiv(tokens, PART), H), or None. The others as
    in _modulated_backward_rows.
    """
    batch = tl.program_id(2).to(tl.int64)
    columns = size.to(tl.int64) * UNIT
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    in_row = col < columns
    dgate = tl.zeros([ROWS, COLS], dtype=tl.float32)
    dscale = tl.zeros([ROWS, COLS], dtype=tl.float32)
    dshift = tl.zeros([ROWS, COLS], dtype=tl.float32)
    dweight = tl.zeros([ROWS, COLS], dtype=tl.float32)
    dbias = tl.zeros([ROWS, COLS], dtype=tl.float32)
    first = tl.program_id(1) * PART
    for start in range(first, tl.minimum(first + PART, tokens), ROWS):
        token = start + tl.arange(0, ROWS)
        is_row = token < tokens
        row = batch * tokens + token
        inside = is_row[:, None] & in_row[None, :]
        at = row[:, None] * columns + col[None, :]
        ds = tl.zeros([ROWS, COLS], dtype=tl.float32)
        if dgate_ptr is not None and grad_s_ptr is not None:
            ds += read(grad_s_ptr + at, inside)
        if grad_z_ptr is not None:
            g = read(grad_z_ptr + at, inside)
            dshift += g
            rstd = tl.load(rstd_ptr + row, mask=is_row, other=0.0)[:, None]
            normal = normal_of(s_ptr, mean_ptr, at, row, is_row, inside, rstd)
            dscale += g * affine(normal, weight_ptr, bias_ptr, col, in_row)
            where = batch * scale_b + token * scale_t
            m = g * (read(scale_ptr + where[:, None] + col[None, :], inside) + scalar(offset))
            dweight += m * normal
            dbias += m
            if dgate_ptr is not None:
                if weight_ptr is not None:
                    m *= read(weight_ptr + col, in_row)[None, :]
                product = tl.load(product_ptr + row, mask=is_row, other=0.0)[:, None]
                center = tl.load(center_ptr + row, mask=is_row, other=0.0)[:, None]
                ds += (m - normal * product - center) * rstd
        if dgate_ptr is not None:
            of_gate = ds * read(y_ptr + at, inside)
            if TANH:
                gate = gate_of(gate_ptr, batch * gate_b + token * gate_t, is_row, col, inside, TANH, GATE_BY_ROW)
                of_gate *= 1.0 - gate * gate
            dgate += of_gate
    to = (batch * tl.num_programs(1) + tl.program_id(1)) * columns + col
    if dgate_ptr is not None:
        tl.store(dgate_ptr + to, tl.sum(dgate, axis=0), mask=in_row)
    if dscale_ptr is not None:
        tl.store(dscale_ptr + to, tl.sum(dscale, axis=0), mask=in_row)
    if dshift_ptr is not None:
        tl.store(dshift_ptr + to, tl.sum(dshift, axis=0), mask=in_row)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + to, tl.sum(dweight, axis=0), mask=in_row)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + to, tl.sum(dbias, axis=0), mask=in_row)


@triton.jit
def normal_of(s_ptr, mean_ptr, at, row, is_row, inside, rstd):
    """Return the normalized numbers of some rows, 0 outside."""
    s = read(s_ptr + at, inside)
    if mean_ptr is not None:
        s = tl.where(inside, s - tl.load(mean_ptr + row, mask=is_row, other=0.0)[:, None], 0.0)
    return s * rstd

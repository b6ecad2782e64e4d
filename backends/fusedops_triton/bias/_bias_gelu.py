"""Bias + GELU in Triton: two launchers and three kernels.

    forward             flat tiles: read x, write y
    backward, columns   for the gradient of a bias (H,): dx, and sums over columns in the same pass
    backward, flat      otherwise. For a bias of another shape, dx is also written in float32, and torch sums it

Common to all kernels:

- ``x + bias``, GELU and sums are computed in float32.
- 0.5 * (1 + tanh(z)) is the logistic function of 2z, accurate to the last places in both tails. So is its derivative,
  which avoids the cancellation of 1 - tanh(z)**2.
- x and grad are made contiguous if they are not. _bias.py has the layout of the bias and the sums.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.dtypes import promoted
from fusedops_triton._jit._bias import (
    BiasLayout,
    add_sums,
    allocate_sums,
    bias_at,
    column_tile,
    flat_tile,
    kind_in_tiles,
    locate,
    rounded,
    store_sums,
    sum_to_bias,
    unit,
)
from fusedops_triton._jit._common import read, reciprocal, widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import Columns, ceil_div, share_columns, tile

# ---------------------------------------------------------------------------------------------------------- launchers


def gelu_forward(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Compute ``gelu(x + bias)``.

    Args:
        x: (...), float16, bfloat16 or float32, any strides.
        bias: broadcastable to x, any of these dtypes, any strides; or None.
        approximate: "tanh", or "none" for the exact form.

    Returns:
        (...), contiguous, the dtype of x + bias.
    """
    dtype = promoted(x, bias)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    n = y.numel()
    if n == 0:
        return y
    x, layout = x.resolve_neg().contiguous(), locate(bias, x.shape)
    narrowest = min(x.element_size(), y.element_size())
    launch = _flat_launch(False, n, narrowest, approximate, *layout[1:])
    launch(y, y, x, layout.tensor)
    return y


def gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and of the bias, each in its dtype; None for one that is not wanted.

    Args:
        grad: (...), the gradient of y, dtype of y, any strides.
        x: as in the forward.
        bias: as in the forward.
        approximate: as in the forward.
        needs: (gradient of x is wanted, gradient of the bias is wanted).
    """
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
    wanted_bias = bias if needs[1] else None
    if x.numel() == 0 or not (needs[0] or wanted_bias is not None):
        return dx, None if wanted_bias is None else torch.zeros_like(wanted_bias, memory_format=torch.contiguous_format)
    grad, x, layout = grad.resolve_neg().contiguous(), x.resolve_neg().contiguous(), locate(bias, x.shape)
    if wanted_bias is not None and layout.columns:
        return dx, _columns_backward(dx, grad, x, layout, wanted_bias, approximate)
    du = None
    if wanted_bias is not None:  # the gradient of x + bias: in the dtype of a bias of x's size, else in that of sums
        du = torch.empty_like(x, dtype=wanted_bias.dtype if wanted_bias.numel() == x.numel() else torch.float32)
    narrowest = min(grad.element_size(), x.element_size())
    launch = _flat_launch(True, x.numel(), narrowest, approximate, *layout[1:])
    launch(x, dx, du, grad, x, layout.tensor)
    return dx, None if wanted_bias is None or du is None else sum_to_bias(du, wanted_bias)


def _columns_backward(
    dx: Tensor | None, grad: Tensor, x: Tensor, layout: BiasLayout, bias: Tensor, approximate: str
) -> Tensor:
    """Write dx, unless it is None, and return the gradient of a bias (H,)."""
    narrowest = min(grad.element_size(), x.element_size())
    n_rows = x.numel() // layout.columns
    launch, columns = _columns_launch(n_rows, narrowest, approximate, layout.unit, layout.sizes[0])
    dbias, sums = allocate_sums(columns, bias)
    launch(x, dx, sums, grad, x, layout.tensor)
    if sums is not dbias:
        add_sums(dbias, sums)
    return dbias


@cached_by_layout
def _flat_launch(
    backward: bool, n: int, narrowest: int, approximate: str, kind: str, bias_unit: int,
    sizes: tuple[int, ...],
) -> Launch:  # fmt: skip
    """Return the launch of ``_forward`` or ``_backward_flat`` for n elements.

    kind, bias_unit and sizes are from ``locate``.
    """
    kernel, unit_n = _backward_flat if backward else _forward, unit(n)
    setting = tile(narrowest)
    constants = {
        "TANH": approximate == "tanh", "KIND": kind_in_tiles(kind, sizes[0] * bias_unit, setting.block),
        "UNIT": bias_unit, "UNIT_N": unit_n, "NARROW": n < 2**31, "EVEN": n % setting.block == 0,
        "BLOCK": setting.block,
    }  # fmt: skip
    return Launch(kernel, (ceil_div(n, setting.block),), (n // unit_n, *sizes), constants, setting.warps)


@cached_by_layout
def _columns_launch(n_rows: int, narrowest: int, approximate: str, bias_unit: int, size: int) -> tuple[Launch, Columns]:
    """Return the launch of ``_backward_columns`` for (n_rows, size * bias_unit), and the setting of its sums."""
    columns = share_columns(n_rows, size * bias_unit, narrowest)
    constants = {
        "TANH": approximate == "tanh", "UNIT": bias_unit, "STEPS": columns.steps, "ROWS": columns.rows,
        "COLS": columns.cols, "EVEN": columns.are_even(n_rows, size * bias_unit),
    }  # fmt: skip
    # in bfloat16 an H200 has 89 % of the speed of a copy; with no tile read ahead 83, with twice the warps 78
    warps = max(columns.warps // 2, 1)
    return Launch(_backward_columns, (columns.tiles, columns.parts), (n_rows, size), constants, warps), columns


# ------------------------------------------------------------------------------------------------------------ kernels
# Triton does not specialise on any integer here: UNIT and UNIT_N give the compiler the alignment.


@profiled(do_not_specialize=["n", "size", "multiplier", "shift"])
def _forward(
    y_ptr, x_ptr, bias_ptr, n, size, multiplier, shift,
    TANH: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, UNIT_N: tl.constexpr, NARROW: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK elements. Grid (cdiv(n * UNIT_N, BLOCK),).

    y_ptr, x_ptr: (n * UNIT_N,). bias_ptr and from ``size`` to ``shift``: see ``bias_at``.
    """
    base, at, inside = flat_tile(n, UNIT_N, BLOCK, EVEN)
    u = read(x_ptr + base + at, inside)
    if KIND != "none":
        u += widened(bias_at(bias_ptr, base, at, inside, size, multiplier, shift, KIND, UNIT, NARROW))
    tl.store(y_ptr + base + at, rounded(gelu(u, TANH), y_ptr), mask=inside)


@profiled(do_not_specialize=["n", "size", "multiplier", "shift"])
def _backward_flat(
    dx_ptr, du_ptr, grad_ptr, x_ptr, bias_ptr, n, size, multiplier, shift,
    TANH: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, UNIT_N: tl.constexpr, NARROW: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK elements of the gradient to dx_ptr and du_ptr. Each can be None. Other arguments as in _forward."""
    base, at, inside = flat_tile(n, UNIT_N, BLOCK, EVEN)
    u = read(x_ptr + base + at, inside)
    if KIND != "none":
        u += widened(bias_at(bias_ptr, base, at, inside, size, multiplier, shift, KIND, UNIT, NARROW))
    du = read(grad_ptr + base + at, inside) * gelu_slope(u, TANH)
    if dx_ptr is not None:
        tl.store(dx_ptr + base + at, rounded(du, dx_ptr), mask=inside)
    if du_ptr is not None:
        tl.store(du_ptr + base + at, rounded(du, du_ptr), mask=inside)


@profiled(do_not_specialize=["n_rows", "size"])
def _backward_columns(
    dx_ptr, sums_ptr, grad_ptr, x_ptr, bias_ptr, n_rows, size,
    TANH: tl.constexpr, UNIT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Write and sum COLS columns of STEPS * ROWS rows. Grid (cdiv(H, COLS), parts), H = size * UNIT.

    dx_ptr: (n_rows, H), or None. sums_ptr: (parts, H), the sum over this program's rows. grad_ptr, x_ptr: (n_rows, H).
    bias_ptr: (H,).
    """
    col = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    bias = read(bias_ptr + col, col < size.to(tl.int64) * UNIT)[None, :]
    sums = tl.zeros([ROWS, COLS], dtype=tl.float32)  # each lane adds up its own elements; one reduction at the end
    at, inside, _ = column_tile(0, n_rows, size, UNIT, STEPS, ROWS, COLS, EVEN)
    next_x = tl.load(x_ptr + at, mask=inside, other=0.0)
    next_grad = tl.load(grad_ptr + at, mask=inside, other=0.0)
    for step in range(STEPS):
        at, inside, _ = column_tile(step, n_rows, size, UNIT, STEPS, ROWS, COLS, EVEN)
        x, grad = next_x, next_grad
        # the next tile is read while this one is computed
        then, there, _ = column_tile(step + 1, n_rows, size, UNIT, STEPS, ROWS, COLS, EVEN)
        there = there & (step + 1 < STEPS)
        next_x = tl.load(x_ptr + then, mask=there, other=0.0)
        next_grad = tl.load(grad_ptr + then, mask=there, other=0.0)
        du = widened(grad) * gelu_slope(widened(x) + bias, TANH)
        if dx_ptr is not None:
            tl.store(dx_ptr + at, rounded(du, dx_ptr), mask=inside)
        sums += du
    store_sums(sums_ptr, sums, size, UNIT, COLS)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def gelu(u, TANH: tl.constexpr):
    """Compute GELU of u, float32."""
    if TANH:
        # exp2 overflows left of -10, where the result is 0 too
        return u * reciprocal(1.0 + tl.exp2(-_exponent(u, u * u)))
    ratio, e = _tail(u)
    tail = ratio * e
    return u * tl.where(u > 0, 1.0 - tail, tail)


@triton.jit
def gelu_slope(u, TANH: tl.constexpr):
    """Compute the derivative of GELU at u."""
    if TANH:
        square = u * u
        t = _exponent(u, square)
        e = tl.exp2(-tl.abs(t))
        r = reciprocal(1.0 + e)
        er = e * r
        # The derivative of 2z is 2 * sqrt(2 / pi) * (1 + 3 * 0.044715 * u * u), that of the logistic function is
        # e * r * r. u * e is computed first: it becomes 0 long before u**3 overflows.
        return tl.where(t > 0, r, er) + (u * (er * r)) * (1.5957691216057308 + 0.21406444881780076 * square)
    ratio, e = _tail(u)
    left = e * (ratio - 0.3989422804014327 * tl.abs(u))  # the derivative at -|u|
    return tl.where(u > 0, 1.0 - left, left)


@triton.jit
def _exponent(u, square):
    """Return 2z / ln(2), where z = sqrt(2 / pi) * (u + 0.044715 * u**3)."""
    return u * (2.302208198144325 + 0.1029432395800235 * square)


@triton.jit
def _tail(u):
    """Return two factors of the normal distribution left of -|u|: a polynomial in 1 / (1 + 0.39 |u|), exp(-u*u / 2).

    Hastings (1955, "Approximations for Digital Computers") has this form. These coefficients, fitted by weighted least
    squares, are within 1.6e-7, in a third of the instructions of tl.erf.
    """
    t = reciprocal(1.0 + 0.39 * tl.abs(u))
    p = 0.37363531312589987 + t * (-0.2571775124537581 + t * 0.05355561037265741)
    p = 0.1514771610196806 + t * (0.1940641621084026 + t * (-0.015554764524084545 + t * p))
    return t * p, tl.exp2(-0.7213475204444817 * u * u)

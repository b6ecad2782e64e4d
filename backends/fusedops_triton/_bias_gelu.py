"""Bias + GELU in Triton: two launchers, and the three kernels that they choose from.

    forward             flat tiles: read x, write y
    backward, columns   for a bias (H,) whose gradient is wanted: dx, and sums over columns in the same pass
    backward, flat      else. For a bias of another shape dx is made in float32 too, and torch sums it

What holds for all of them:

- The sum, the function and the sums are in float32, in float64 for float64.
- 0.5 * (1 + tanh(z)) is the logistic function of 2z; with exp(-|2z|), which does not overflow, it is good to its last
  places in both tails, and so is its slope: no 1 - tanh(z)**2, which cancels.
- x and grad are made contiguous first if they are not. Where the bias lies, and how the sums are shared out: _bias.py.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false
# Triton is not typed, and the body of a jit function is a language of its own that only looks like Python.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops_triton._autotune import Tuned, tuned
from fusedops_triton._bias import (
    Bias,
    add_sums,
    bias_at,
    column_tile,
    flat_tile,
    locate,
    rounded,
    store_sums,
    summed,
    sums_for,
    unit,
    wide,
)
from fusedops_triton._launch import Launch, by_layout
from fusedops_triton._settings import Columns, Tile, ceil_div, share_columns, tile

# ---------------------------------------------------------------------------------------------------------- launchers


def gelu_forward(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """``gelu(x + bias)``.

    Args:
        x: (...), float16, bfloat16, float32 or float64, any strides.
        bias: broadcastable to x, any of these dtypes, any strides. Or None.
        approximate: "tanh", or "none" for erf.

    Returns:
        (...), contiguous, the dtype of x + bias.
    """
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    n = y.numel()
    if n == 0:
        return y
    x, place = x.contiguous(), locate(bias, x.shape)
    narrowest = min(x.element_size(), y.element_size())
    launch = _flat_launch(False, n, narrowest, dtype, approximate, *place[1:])
    launch(y, y, x, place.tensor)
    return y


def gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of bias, each in its dtype, None where ``needs`` does not ask for it.

    Args:
        grad: (...), the gradient of y, dtype of y, any strides.
        x: as forward had it.
        bias: as forward had it.
        approximate: as forward had it.
        needs: is the gradient of x, of bias wanted.
    """
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
    target = bias if needs[1] else None  # whose gradient is wanted
    if x.numel() == 0 or not (needs[0] or target is not None):
        return dx, None if target is None else torch.zeros_like(target, memory_format=torch.contiguous_format)
    grad, x, place = grad.contiguous(), x.contiguous(), locate(bias, x.shape)
    if target is not None and place.columns:
        return dx, _backward_of_columns(dx, grad, x, place, target, approximate)
    du = None
    if target is not None:  # one gradient for each element: the bias's own, or in the dtype of sums for torch to sum
        sums = torch.promote_types(grad.dtype, torch.float32)
        du = torch.empty_like(x, dtype=target.dtype if target.numel() == x.numel() else sums)
    narrowest = min(grad.element_size(), x.element_size())
    launch = _flat_launch(True, x.numel(), narrowest, grad.dtype, approximate, *place[1:])
    launch(x, dx, du, grad, x, place.tensor)
    return dx, None if target is None or du is None else summed(du, target)


def _backward_of_columns(
    dx: Tensor | None, grad: Tensor, x: Tensor, place: Bias, bias: Tensor, approximate: str
) -> Tensor:
    """Fills dx, if it is wanted, and returns the gradient of a bias (H,)."""
    narrowest = min(grad.element_size(), x.element_size())
    launch, share = _columns_launch(
        x.numel() // place.columns, narrowest, grad.dtype, approximate, place[2], place[3][0]
    )
    dbias, sums = sums_for(share, bias, wide(grad.dtype))
    launch(x, dx, sums, grad, x, place.tensor)
    if sums is not dbias:
        add_sums(dbias, sums)
    return dbias


@by_layout
def _flat_launch(
    backward: bool, n: int, narrowest: int, dtype: torch.dtype, approximate: str, kind: str, unit_of: int,
    sizes: tuple[int, ...],
) -> Launch | Tuned:  # fmt: skip
    """_forward or _backward_flat for n elements; of the bias, what ``locate`` says."""
    kernel, unit_n = _backward_flat if backward else _forward, unit(n)

    def make(setting: Tile) -> Launch:
        constants = {
            "TANH": approximate == "tanh", "KIND": kind, "UNIT": unit_of, "UNIT_N": unit_n, "BLOCK": setting.block,
            "WIDE": wide(dtype),
        }  # fmt: skip
        return Launch(kernel, (ceil_div(n, setting.block),), (n // unit_n, *sizes), constants, setting.warps)

    return tuned(make, tile(narrowest), 0, narrowest)


@by_layout
def _columns_launch(
    n_rows: int, narrowest: int, dtype: torch.dtype, approximate: str, unit_of: int, size: int
) -> tuple[Launch, Columns]:
    """_backward_columns for (n_rows, size * unit_of), and how its sums are shared out."""
    share = share_columns(n_rows, size * unit_of, narrowest)
    constants = {
        "TANH": approximate == "tanh", "UNIT": unit_of, "STEPS": share.steps, "ROWS": share.rows, "COLS": share.cols,
        "WIDE": wide(dtype),
    }  # fmt: skip
    return Launch(_backward_columns, (share.tiles, share.parts), (n_rows, size), constants, share.warps), share


# ------------------------------------------------------------------------------------------------------------ kernels
# No integer is specialised on: what the compiler should know of their alignment is in UNIT and UNIT_N.


@triton.jit(do_not_specialize=["n", "size", "inner", "wrap", "outer", "step"])
def _forward(
    y_ptr, x_ptr, bias_ptr, n, size, inner, wrap, outer, step,
    TANH: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, UNIT_N: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """BLOCK elements. Grid (cdiv(n * UNIT_N, BLOCK),).

    y_ptr, x_ptr: (n * UNIT_N,). bias_ptr and from ``size`` to ``step``: see ``bias_at``.
    """
    base, at, inside = flat_tile(n, UNIT_N, BLOCK)
    u = tl.load(x_ptr + base + at, mask=inside, other=0.0).to(WIDE)
    if KIND != "none":
        u += bias_at(bias_ptr, base, at, inside, size, inner, wrap, outer, step, KIND, UNIT).to(WIDE)
    tl.store(y_ptr + base + at, rounded(_gelu(u, TANH), y_ptr), mask=inside)


@triton.jit(do_not_specialize=["n", "size", "inner", "wrap", "outer", "step"])
def _backward_flat(
    dx_ptr, du_ptr, grad_ptr, x_ptr, bias_ptr, n, size, inner, wrap, outer, step,
    TANH: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr, UNIT_N: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of the gradient, to dx_ptr and to du_ptr, either of which may be None. Else as _forward."""
    base, at, inside = flat_tile(n, UNIT_N, BLOCK)
    u = tl.load(x_ptr + base + at, mask=inside, other=0.0).to(WIDE)
    if KIND != "none":
        u += bias_at(bias_ptr, base, at, inside, size, inner, wrap, outer, step, KIND, UNIT).to(WIDE)
    du = tl.load(grad_ptr + base + at, mask=inside, other=0.0).to(WIDE) * _slope(u, TANH)
    if dx_ptr is not None:
        tl.store(dx_ptr + base + at, rounded(du, dx_ptr), mask=inside)
    if du_ptr is not None:
        tl.store(du_ptr + base + at, rounded(du, du_ptr), mask=inside)


@triton.jit(do_not_specialize=["n_rows", "size"])
def _backward_columns(
    dx_ptr, sums_ptr, grad_ptr, x_ptr, bias_ptr, n_rows, size,
    TANH: tl.constexpr, UNIT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """COLS columns of STEPS * ROWS rows. Grid (cdiv(H, COLS), parts), H = size * UNIT.

    dx_ptr: (n_rows, H), or None. sums_ptr: (parts, H), the sum over this program's rows. grad_ptr, x_ptr: (n_rows, H).
    bias_ptr: (H,).
    """
    col = tl.program_id(0).to(tl.int64) * COLS + tl.arange(0, COLS)
    bias = tl.load(bias_ptr + col, mask=col < size.to(tl.int64) * UNIT, other=0.0).to(WIDE)[None, :]
    sums = tl.zeros([ROWS, COLS], dtype=WIDE)  # every lane adds up its own; one reduction at the end
    for step in range(STEPS):
        at, inside, _ = column_tile(step, n_rows, size, UNIT, STEPS, ROWS, COLS)
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0)
        du = grad.to(WIDE) * _slope(x.to(WIDE) + bias, TANH)
        if dx_ptr is not None:
            tl.store(dx_ptr + at, rounded(du, dx_ptr), mask=inside)
        sums += du
    store_sums(sums_ptr, sums, size, UNIT, COLS)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def _gelu(u, TANH: tl.constexpr):
    """GELU of u, float32 or float64."""
    if TANH:
        t, e = _logistic(u, u * u)
        return u * tl.where(t > 0, 1.0, e) / (1.0 + e)
    return 0.5 * u * (1.0 + tl.erf(0.7071067811865476 * u))


@triton.jit
def _slope(u, TANH: tl.constexpr):
    """The derivative of GELU at u."""
    if TANH:
        square = u * u
        t, e = _logistic(u, square)
        r = 1.0 / (1.0 + e)
        er = e * r
        # 2z has the slope 2 * sqrt(2 / pi) * (1 + 3 * 0.044715 * u * u), the logistic function e * r * r. u * e comes
        # first: it is 0 long before u**3 is infinite
        return tl.where(t > 0, r, er) + (u * (er * r)) * (1.5957691216057308 + 0.21406444881780076 * square)
    cdf = 0.5 + 0.5 * tl.erf(0.7071067811865476 * u)
    return cdf + u * (0.3989422804014327 * tl.exp2(-0.7213475204444817 * u * u))


@triton.jit
def _logistic(u, square):
    """With z = sqrt(2 / pi) * (u + 0.044715 * u**3): 2z / ln(2), and exp(-|2z|), which is a power of 2 of that."""
    t = u * (2.302208198144325 + 0.1029432395800235 * square)
    return t, tl.exp2(-tl.abs(t))

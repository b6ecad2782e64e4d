"""Bias + dropout, with and without a residual, in Triton: two launchers, and the three kernels that they choose from.

    forward             flat tiles: read x (and residual), write y
    backward, columns   for a bias (H,) whose gradient is wanted: dx, and sums over columns in the same pass
    backward, flat      else. For a bias of another shape the gradient is made in float32 too, and torch sums it

What holds for all of them:

- Whether an element is kept follows from the seed and its linear index alone (fusedops/ops/_philox.py): nothing is
  stored, backward asks again. The seed is read on the device, so nothing waits for it and graphs may capture a call.
- One run of Philox serves four neighbours. Their four bits are packed into a number, spread over the four and tested
  there: this keeps 16-byte accesses without a shuffle (joining the words moves them through shared memory). With
  multiplications of 32 * 32 to 64 bits, all of it without a bias is 19 instructions an element on sm_90; with
  tl.randint4x, which multiplies twice for the two halves, 24. An H200 has time for some 25 while it moves 4 bytes.
- x, residual and grad are made contiguous first if they are not. Where the bias lies, and how the sums are shared out:
  _bias.py.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false
# Triton is not typed, and the body of a jit function is a language of its own that only looks like Python.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.ops._philox import threshold
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
from fusedops_triton._launch import Launch, by_layout, scalar_for
from fusedops_triton._settings import Columns, Tile, ceil_div, share_columns, tile

# ---------------------------------------------------------------------------------------------------------- launchers


class _Dropout(NamedTuple):
    """Dropout as kernels take it."""

    seed: Tensor | None  # None: keep everything
    scale: float | int  # of what is kept, see ``scalar_for``
    last: int  # the largest word that drops its element: an unsigned number, as int32 has the same bits


def _dropout(p: float, training: bool, seed: Tensor | None, dtype: torch.dtype) -> _Dropout:
    drops, scale, last = _numbers(p if training else 0.0, dtype)
    return _Dropout(seed if drops else None, scale, last)


@by_layout  # 0.2 us instead of 0.7
def _numbers(p: float, dtype: torch.dtype) -> tuple[bool, float | int, int]:
    """Whether any element is dropped, and ``scale`` and ``last`` of ``_Dropout``."""
    if p == 0:
        return False, scalar_for(1.0, dtype), 0
    scale = scalar_for(1 / (1 - p) if p < 1 else 0.0, dtype)
    # p = 1: the threshold 2**32 is no 32-bit number, the last word that drops is. p below 2**-33: no word drops.
    last = threshold(p) - 1
    return last >= 0, scale, last - 2**32 if last >= 2**31 else last


def dropout_forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, training: bool, seed: Tensor | None
) -> Tensor:
    """``dropout(x + bias)``, or ``residual + dropout(x + bias)``.

    Args:
        x: (...), float16, bfloat16, float32 or float64, any strides.
        bias: broadcastable to x, any of these dtypes, any strides. Or None.
        residual: the shape of x, any of these dtypes, any strides; x and bias are taken in its dtype. Or None.
        p: probability of dropping.
        training: False drops nothing.
        seed: int64, one element. Not used where nothing is dropped.

    Returns:
        (...), contiguous, the dtype of residual; without one, of x + bias.
    """
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    dtype = dtype if residual is None else residual.dtype
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    n = y.numel()
    if n == 0:
        return y
    x, place = x.contiguous(), locate(bias, x.shape)
    residual = None if residual is None else residual.contiguous()
    drop = _dropout(p, training, seed, dtype)
    launch = _forward_launch(n, min(x.element_size(), y.element_size()), dtype, *place[1:])
    launch(y, y, x, place.tensor, residual, *drop)
    return y


def dropout_backward(
    grad: Tensor,
    seed: Tensor | None,
    bias: Tensor | None,
    p: float,
    training: bool,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of bias, each in its dtype, None where ``needs`` does not ask for it.

    Args:
        grad: (...), the gradient of y, dtype of y, any strides.
        seed: as forward had it.
        bias: as forward had it; only its shape and dtype are used.
        p: as forward had it.
        training: as forward had it.
        x_dtype: of x.
        needs: is the gradient of x, of bias wanted.
    """
    dx = torch.empty_like(grad, dtype=x_dtype, memory_format=torch.contiguous_format) if needs[0] else None
    target = bias if needs[1] else None  # whose gradient is wanted
    if grad.numel() == 0 or not (needs[0] or target is not None):
        return dx, None if target is None else torch.zeros_like(target, memory_format=torch.contiguous_format)
    grad = grad.contiguous()
    drop = _dropout(p, training, seed, grad.dtype)
    place = locate(target, grad.shape)
    # rows that are no multiple of 4 would tear the groups that share a run of Philox
    if target is not None and place.columns and (drop.seed is None or place.columns % 4 == 0):
        return dx, _backward_of_columns(dx, grad, drop, place, target)
    du = None
    if target is not None:  # one gradient for each element: the bias's own, or in the dtype of sums for torch to sum
        sums = torch.promote_types(grad.dtype, torch.float32)
        du = torch.empty_like(grad, dtype=target.dtype if target.numel() == grad.numel() else sums)
    launch = _flat_launch(grad.numel(), min(grad.element_size(), x_dtype.itemsize), grad.dtype)
    launch(grad, dx, du, grad, *drop)
    return dx, None if target is None or du is None else summed(du, target)


def _backward_of_columns(dx: Tensor | None, grad: Tensor, drop: _Dropout, place: Bias, bias: Tensor) -> Tensor:
    """Fills dx, if it is wanted, and returns the gradient of a bias (H,)."""
    narrowest = grad.element_size() if dx is None else min(grad.element_size(), dx.element_size())
    launch, share = _columns_launch(grad.numel() // place.columns, narrowest, grad.dtype, place.unit, place.sizes[0])
    dbias, sums = sums_for(share, bias, wide(grad.dtype))
    launch(grad, dx, sums, grad, *drop)
    if sums is not dbias:
        add_sums(dbias, sums)
    return dbias


@by_layout
def _forward_launch(
    n: int, narrowest: int, dtype: torch.dtype, kind: str, unit_of: int, sizes: tuple[int, ...]
) -> Launch | Tuned:
    """_forward for n elements; of the bias, what ``locate`` says."""
    unit_n = unit(n)

    def make(setting: Tile) -> Launch:
        constants = {"KIND": kind, "UNIT": unit_of, "UNIT_N": unit_n, "BLOCK": setting.block, "WIDE": wide(dtype)}
        return Launch(_forward, (ceil_div(n, setting.block),), (n // unit_n, *sizes), constants, setting.warps)

    return tuned(make, tile(narrowest), 0, narrowest)


@by_layout
def _flat_launch(n: int, narrowest: int, dtype: torch.dtype) -> Launch | Tuned:
    """_backward_flat for n elements."""
    unit_n = unit(n)

    def make(setting: Tile) -> Launch:
        constants = {"UNIT_N": unit_n, "BLOCK": setting.block, "WIDE": wide(dtype)}
        return Launch(_backward_flat, (ceil_div(n, setting.block),), (n // unit_n,), constants, setting.warps)

    return tuned(make, tile(narrowest), 0, narrowest)


@by_layout
def _columns_launch(n_rows: int, narrowest: int, dtype: torch.dtype, unit_of: int, size: int) -> tuple[Launch, Columns]:
    """_backward_columns for (n_rows, size * unit_of), and how its sums are shared out."""
    share = share_columns(n_rows, size * unit_of, narrowest)
    constants = {"UNIT": unit_of, "STEPS": share.steps, "ROWS": share.rows, "COLS": share.cols, "WIDE": wide(dtype)}
    return Launch(_backward_columns, (share.tiles, share.parts), (n_rows, size), constants, share.warps), share


# ------------------------------------------------------------------------------------------------------------ kernels
# No integer is specialised on: what the compiler should know of their alignment is in UNIT and UNIT_N. Nor is the
# seed's address: it is read once.


@triton.jit(do_not_specialize=["seed_ptr", "scale", "last", "n", "size", "inner", "wrap", "outer", "step"])
def _forward(
    y_ptr, x_ptr, bias_ptr, residual_ptr, seed_ptr, scale, last, n, size, inner, wrap, outer, step,
    KIND: tl.constexpr, UNIT: tl.constexpr, UNIT_N: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """BLOCK elements. Grid (cdiv(n * UNIT_N, BLOCK),).

    y_ptr, x_ptr: (n * UNIT_N,). residual_ptr: the same, or None. bias_ptr and from ``size`` to ``step``: see
    ``bias_at``. seed_ptr: (1,) int64, or None. scale, last: see ``_Dropout``.
    """
    base, at, inside = flat_tile(n, UNIT_N, BLOCK)
    x = tl.load(x_ptr + base + at, mask=inside, other=0.0)
    if residual_ptr is not None:
        x = rounded(x, y_ptr)  # the residual's dtype
    u = x.to(WIDE)
    if KIND != "none":
        bias = bias_at(bias_ptr, base, at, inside, size, inner, wrap, outer, step, KIND, UNIT)
        if residual_ptr is not None:
            bias = rounded(bias, y_ptr)
        u += bias.to(WIDE)
    u *= _scalar(scale, WIDE)
    if seed_ptr is not None:
        u = tl.where(_kept(seed_ptr, base // 4, last, BLOCK), u, 0.0)
    if residual_ptr is not None:
        u += tl.load(residual_ptr + base + at, mask=inside, other=0.0).to(WIDE)
    tl.store(y_ptr + base + at, rounded(u, y_ptr), mask=inside)


@triton.jit(do_not_specialize=["seed_ptr", "scale", "last", "n"])
def _backward_flat(
    dx_ptr, du_ptr, grad_ptr, seed_ptr, scale, last, n,
    UNIT_N: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of the gradient, to dx_ptr and to du_ptr, either of which may be None. Else as _forward."""
    base, at, inside = flat_tile(n, UNIT_N, BLOCK)
    du = tl.load(grad_ptr + base + at, mask=inside, other=0.0).to(WIDE) * _scalar(scale, WIDE)
    if seed_ptr is not None:
        du = tl.where(_kept(seed_ptr, base // 4, last, BLOCK), du, 0.0)
    if dx_ptr is not None:
        tl.store(dx_ptr + base + at, rounded(du, dx_ptr), mask=inside)
    if du_ptr is not None:
        tl.store(du_ptr + base + at, rounded(du, du_ptr), mask=inside)


@triton.jit(do_not_specialize=["seed_ptr", "scale", "last", "n_rows", "size"])
def _backward_columns(
    dx_ptr, sums_ptr, grad_ptr, seed_ptr, scale, last, n_rows, size,
    UNIT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """COLS columns of STEPS * ROWS rows. Grid (cdiv(H, COLS), parts), H = size * UNIT, a multiple of 4 with a seed.

    dx_ptr: (n_rows, H), or None. sums_ptr: (parts, H), the sum over this program's rows. grad_ptr: (n_rows, H). Else as
    _forward.
    """
    sums = tl.zeros([ROWS, COLS], dtype=WIDE)  # every lane adds up its own; one reduction at the end
    for step in range(STEPS):
        at, inside, row = column_tile(step, n_rows, size, UNIT, STEPS, ROWS, COLS)
        du = tl.load(grad_ptr + at, mask=inside, other=0.0).to(WIDE) * _scalar(scale, WIDE)
        if seed_ptr is not None:
            first = row * (size.to(tl.int64) * UNIT // 4) + tl.program_id(0).to(tl.int64) * (COLS // 4)
            du = tl.where(_kept(seed_ptr, first[:, None], last, COLS), du, 0.0)
        if dx_ptr is not None:
            tl.store(dx_ptr + at, rounded(du, dx_ptr), mask=inside)
        sums += du
    store_sums(sums_ptr, sums, size, UNIT, COLS)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def _scalar(value, WIDE: tl.constexpr):
    """A float32 as it is; for float64 the bits of a double, as ``_launch.scalar_for`` passes them."""
    if WIDE == tl.float64:  # noqa: SIM300 - ruff takes any upper case name for a constant
        value = value.to(tl.int64).to(tl.float64, bitcast=True)
    return value


@triton.jit
def _kept(seed_ptr, first, last, SIZE: tl.constexpr):
    """Which elements are kept: of SIZE, from counter ``first`` (their index // 4) on, 64-bit.

    first: a number, for (SIZE,), or (R, 1), for (R, SIZE).
    """
    bits = _bits(tl.load(seed_ptr), first + tl.arange(0, SIZE // 4), last.to(tl.uint32, bitcast=True))
    element = tl.arange(0, SIZE) % 4
    if len(bits.shape) == 1:
        spread = tl.reshape(tl.broadcast_to(bits[:, None], [SIZE // 4, 4]), [SIZE])
    else:
        ROWS: tl.constexpr = bits.shape[0]
        spread = tl.reshape(tl.broadcast_to(bits[:, :, None], [ROWS, SIZE // 4, 4]), [ROWS, SIZE])
        element = element[None, :]
    return ((spread >> element) & 1) != 0


@triton.jit
def _bits(seed, counter, last):
    """For each counter (int64) an int32: bit k says that output word k of Philox is above ``last``, a uint32."""
    w0, w1, w2, w3 = _philox(seed, counter)
    low = (w0 > last).to(tl.int32) | ((w1 > last).to(tl.int32) << 1)
    return low | ((w2 > last).to(tl.int32) << 2) | ((w3 > last).to(tl.int32) << 3)


@triton.jit
def _philox(seed, counter):
    """The four words (uint32) of Philox4x32-10 for each counter, seed and counter int64."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = c2
    for _ in tl.static_range(10):  # pyright: ignore[reportGeneralTypeIssues]
        first, second = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (second >> 32).to(tl.uint32) ^ c1 ^ k0, (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = second.to(tl.uint32), first.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3

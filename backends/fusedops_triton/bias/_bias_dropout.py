"""Bias + dropout, with and without a residual, in Triton: two launchers and three kernels.

    forward             flat tiles: read x (and residual), write y
    backward, columns   for the gradient of a bias (H,): dx, and sums over columns in the same pass
    backward, flat      otherwise. For a bias of another shape, a gradient in float32 is also written, and torch sums it

Common to all kernels:

- The seed and the linear index of an element determine if it is kept (fusedops/philox.py). Nothing is saved:
  backward computes the mask again. The kernel reads the seed on the device, so there is no synchronisation, and CUDA
  graphs can capture a call.
- One Philox call gives four words, for four neighbouring elements. A thread computes the words of the elements that it
  loads, in their order. This keeps 16-byte accesses without a shuffle. With multiplications of 32 * 32 to 64 bits, the
  kernel without a bias takes 16 instructions per element on sm_90; with tl.randint4x, which multiplies twice for the
  two halves, it takes 24. An H200 has time for about 31 while it moves 4 bytes.
- x, residual and grad are made contiguous if they are not. _bias.py has the layout of the bias and the sums.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.dtypes import promoted
from fusedops.philox import threshold
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
from fusedops_triton._jit._common import read, scalar, widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout, compiles_ptx
from fusedops_triton.launch.settings import HALF_RESIDENT, Columns, ceil_div, dropout_tile, share_columns, tile

# ---------------------------------------------------------------------------------------------------------- launchers


class _DropoutArguments(NamedTuple):
    """The kernel arguments for dropout."""

    seed: Tensor | None  # None: keep all elements
    scale: float  # factor of the kept elements
    last: int  # the largest word whose element is dropped: an unsigned number, passed as the int32 with the same bits


def bias_dropout(x: Tensor, bias: Tensor | None, p: float, training: bool, seed: Tensor | None) -> Tensor:
    """Compute the op for any shape, strides and bias shape."""
    return dropout_forward(x, bias, None, p, training, seed)


def _dropout_arguments(p: float, training: bool, seed: Tensor | None) -> _DropoutArguments:
    drops, scale, last = _scale_and_last(p if training else 0.0)
    return _DropoutArguments(seed.resolve_neg() if drops and seed is not None else None, scale, last)


@cached_by_layout  # 0.2 us instead of 0.7 us
def _scale_and_last(p: float) -> tuple[bool, float, int]:
    """Return if any element is dropped, and ``scale`` and ``last`` of ``_DropoutArguments``."""
    if p == 0:
        return False, 1.0, 0
    scale = 1 / (1 - p) if p < 1 else 0.0
    # The threshold of p = 1, 2**32, does not fit in 32 bits; threshold - 1 does. For p below 2**-33 it is -1.
    last = threshold(p) - 1
    return last >= 0, scale, last - 2**32 if last >= 2**31 else last


def dropout_forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, training: bool, seed: Tensor | None
) -> Tensor:
    """Compute ``dropout(x + bias)``, or ``residual + dropout(x + bias)``.

    Args:
        x: (...), float16, bfloat16 or float32, any strides.
        bias: broadcastable to x, any of these dtypes, any strides; or None.
        residual: the shape of x, any of these dtypes, any strides; x and bias are converted to its dtype. Or None.
        p: probability of dropping.
        training: False drops nothing.
        seed: int64, one element. It is not used if nothing is dropped.

    Returns:
        (...), contiguous, the dtype of residual; without one, of x + bias.
    """
    dtype = promoted(x, bias)
    dtype = dtype if residual is None else residual.dtype
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    n = y.numel()
    if n == 0:
        return y
    x, layout = x.resolve_neg().contiguous(), locate(bias, x.shape)
    residual = None if residual is None else residual.resolve_neg().contiguous()
    dropout = _dropout_arguments(p, training, seed)
    launch = _forward_launch(n, min(x.element_size(), y.element_size()), residual is not None, *layout[1:])
    launch(y, y, x, layout.tensor, residual, *dropout)
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
    """Compute the gradients of x and of the bias, each in its dtype; None for one that is not wanted.

    Args:
        grad: (...), the gradient of y, dtype of y, any strides.
        seed: as in the forward.
        bias: as in the forward; only its shape and dtype are used.
        p: as in the forward.
        training: as in the forward.
        x_dtype: dtype of x.
        needs: (gradient of x is wanted, gradient of the bias is wanted).
    """
    dx = torch.empty_like(grad, dtype=x_dtype, memory_format=torch.contiguous_format) if needs[0] else None
    bias = bias if needs[1] else None
    if grad.numel() == 0 or not (needs[0] or bias is not None):
        return dx, None if bias is None else torch.zeros_like(bias, memory_format=torch.contiguous_format)
    grad = grad.resolve_neg().contiguous()
    dropout = _dropout_arguments(p, training, seed)
    layout = locate(bias, grad.shape)
    # with a row length that is not a multiple of 4, rows would split the groups that share a Philox call
    if bias is not None and layout.columns and (dropout.seed is None or layout.columns % 4 == 0):
        return dx, _columns_backward(dx, grad, dropout, layout, bias)
    du = None
    if bias is not None:  # the gradient of x + bias: in the dtype of a bias of x's size, else in the dtype of sums
        du = torch.empty_like(grad, dtype=bias.dtype if bias.numel() == grad.numel() else torch.float32)
    launch = _flat_launch(grad.numel(), min(grad.element_size(), x_dtype.itemsize))
    launch(grad, dx, du, grad, *dropout)
    return dx, None if bias is None or du is None else sum_to_bias(du, bias)


def _columns_backward(
    dx: Tensor | None, grad: Tensor, dropout: _DropoutArguments, layout: BiasLayout, bias: Tensor
) -> Tensor:
    """Write dx, unless it is None, and return the gradient of a bias (H,)."""
    narrowest = grad.element_size() if dx is None else min(grad.element_size(), dx.element_size())
    n_rows = grad.numel() // layout.columns
    launch, columns = _columns_launch(n_rows, narrowest, layout.unit, layout.sizes[0])
    dbias, sums = allocate_sums(columns, bias)
    launch(grad, dx, sums, grad, *dropout)
    if sums is not dbias:
        add_sums(dbias, sums)
    return dbias


@cached_by_layout
def _forward_launch(n: int, narrowest: int, adds: bool, kind: str, bias_unit: int, sizes: tuple[int, ...]) -> Launch:
    """Return the launch of ``_forward`` for n elements; kind, bias_unit and sizes are from ``locate``.

    adds: there is a residual.
    """
    unit_n = unit(n)
    setting = tile(narrowest) if adds else dropout_tile(narrowest)
    constants = {
        "KIND": kind_in_tiles(kind, sizes[0] * bias_unit, setting.block), "UNIT": bias_unit, "UNIT_N": unit_n,
        "NARROW": n < 2**31, "EVEN": n % setting.block == 0, "BLOCK": setting.block,
        "CALLS": _calls(narrowest, setting.block), "PTX": compiles_ptx(_forward),
    }  # fmt: skip
    grid = (ceil_div(n, setting.block),)
    return Launch(_forward, grid, (n // unit_n, *sizes), constants, setting.warps, HALF_RESIDENT)


@cached_by_layout
def _flat_launch(n: int, narrowest: int) -> Launch:
    """Return the launch of ``_backward_flat`` for n elements."""
    unit_n = unit(n)
    setting = dropout_tile(narrowest)
    constants = {
        "UNIT_N": unit_n, "EVEN": n % setting.block == 0, "BLOCK": setting.block,
        "CALLS": _calls(narrowest, setting.block), "PTX": compiles_ptx(_backward_flat),
    }  # fmt: skip
    grid = (ceil_div(n, setting.block),)
    return Launch(_backward_flat, grid, (n // unit_n,), constants, setting.warps, HALF_RESIDENT)


@cached_by_layout
def _columns_launch(n_rows: int, narrowest: int, bias_unit: int, size: int) -> tuple[Launch, Columns]:
    """Return the launch of ``_backward_columns`` for (n_rows, size * bias_unit), and the setting of its sums."""
    columns = share_columns(n_rows, size * bias_unit, narrowest, inputs=1)
    constants = {
        "UNIT": bias_unit, "STEPS": columns.steps, "ROWS": columns.rows, "COLS": columns.cols,
        "EVEN": columns.are_even(n_rows, size * bias_unit), "CALLS": _calls(narrowest, columns.cols),
        "CARRY": n_rows * size * bias_unit >= 2**34, "PTX": compiles_ptx(_backward_columns),
    }  # fmt: skip
    return Launch(_backward_columns, (columns.tiles, columns.parts), (n_rows, size), constants, columns.warps), columns


def _calls(narrowest: int, elements: int) -> int:
    """Return the Philox calls for one access of 16 bytes. See ``_kept``."""
    return 2 if narrowest == 2 and elements >= 8 else 1


# ------------------------------------------------------------------------------------------------------------ kernels
# Triton does not specialise on any integer here: UNIT and UNIT_N give the compiler the alignment. It does not
# specialise on the address of the seed either, which is read once.


@profiled(do_not_specialize=["seed_ptr", "scale", "last", "n", "size", "multiplier", "shift"])
def _forward(
    y_ptr, x_ptr, bias_ptr, residual_ptr, seed_ptr, scale, last, n, size, multiplier, shift,
    KIND: tl.constexpr, UNIT: tl.constexpr, UNIT_N: tl.constexpr, NARROW: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, CALLS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK elements. Grid (cdiv(n * UNIT_N, BLOCK),).

    y_ptr, x_ptr: (n * UNIT_N,). residual_ptr: the same, or None. bias_ptr and from ``size`` to ``shift``: see
    ``bias_at``. seed_ptr: (1,) int64, or None. scale, last: see ``_DropoutArguments``.
    """
    base, at, inside = flat_tile(n, UNIT_N, BLOCK, EVEN)
    x = tl.load(x_ptr + base + at, mask=inside, other=0.0)
    if residual_ptr is not None:
        x = rounded(x, y_ptr)  # the residual's dtype
    u = widened(x)
    if KIND != "none":
        bias = bias_at(bias_ptr, base, at, inside, size, multiplier, shift, KIND, UNIT, NARROW)
        if residual_ptr is not None:
            bias = rounded(bias, y_ptr)
        u += widened(bias)
    if seed_ptr is not None:  # before the multiplication, so that two elements are rounded by one instruction
        u = tl.where(_kept_in_tile(seed_ptr, last, BLOCK, CALLS, PTX), u, 0.0)
    u *= scalar(scale)
    if residual_ptr is not None:
        u += read(residual_ptr + base + at, inside)
    tl.store(y_ptr + base + at, rounded(u, y_ptr), mask=inside)


@profiled(do_not_specialize=["seed_ptr", "scale", "last", "n"])
def _backward_flat(
    dx_ptr, du_ptr, grad_ptr, seed_ptr, scale, last, n,
    UNIT_N: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, CALLS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Write BLOCK elements of the gradient to dx_ptr and du_ptr. Each can be None. Other arguments as in _forward."""
    base, at, inside = flat_tile(n, UNIT_N, BLOCK, EVEN)
    du = read(grad_ptr + base + at, inside)
    if seed_ptr is not None:
        du = tl.where(_kept_in_tile(seed_ptr, last, BLOCK, CALLS, PTX), du, 0.0)
    du *= scalar(scale)
    if dx_ptr is not None:
        tl.store(dx_ptr + base + at, rounded(du, dx_ptr), mask=inside)
    if du_ptr is not None:
        tl.store(du_ptr + base + at, rounded(du, du_ptr), mask=inside)


@profiled(do_not_specialize=["seed_ptr", "scale", "last", "n_rows", "size"])
def _backward_columns(
    dx_ptr, sums_ptr, grad_ptr, seed_ptr, scale, last, n_rows, size,
    UNIT: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr,
    CALLS: tl.constexpr, CARRY: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Write and sum COLS columns of STEPS * ROWS rows. Grid (cdiv(H, COLS), parts).

    H = size * UNIT, a multiple of 4 with a seed. dx_ptr: (n_rows, H), or None. sums_ptr: (parts, H), the sum over this
    program's rows. grad_ptr: (n_rows, H). Other arguments as in _forward.
    """
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    sums = tl.zeros([ROWS, COLS], dtype=tl.float32)  # each lane adds up its own elements; one reduction at the end
    for step in range(STEPS):
        at, inside, row = column_tile(step, n_rows, size, UNIT, STEPS, ROWS, COLS, EVEN)
        du = read(grad_ptr + at, inside)
        if seed_ptr is not None:
            groups, col = size.to(tl.int64) * UNIT // 4, tl.program_id(0) * (COLS // 4)
            if CARRY:
                first = (row * groups + col)[:, None]
                low, high = first.to(tl.uint32), (first >> 32).to(tl.uint32)
            else:
                low = (row.to(tl.uint32) * groups.to(tl.uint32) + col.to(tl.uint32))[:, None]
                high = tl.zeros_like(low)
            du = tl.where(_kept(seed, low, high, last, COLS, CALLS, CARRY, PTX), du, 0.0)
        du *= scalar(scale)
        if dx_ptr is not None:
            tl.store(dx_ptr + at, rounded(du, dx_ptr), mask=inside)
        sums += du
    store_sums(sums_ptr, sums, size, UNIT, COLS)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def _kept(seed, low, high, last, SIZE: tl.constexpr, CALLS: tl.constexpr, CARRY: tl.constexpr, PTX: tl.constexpr):
    """Return the keep-mask of SIZE elements from the counter of halves ``low`` and ``high`` (uint32).

    A counter is the linear index of an element // 4. low, high: numbers, for a mask (SIZE,); or (R, 1), for a mask
    (R, SIZE). CALLS: 1 or 2 Philox calls, for the 4 or 8 neighbours that one access loads. A thread computes the words
    of the elements that it loads. CARRY: the upper halves of the counters may differ. PTX: see ``_product``.
    """
    counter = low + (tl.arange(0, SIZE // (4 * CALLS)) * CALLS).to(tl.uint32)
    if CARRY:
        high += (counter < low).to(tl.uint32)
    w0, w1, w2, w3 = philox(seed, counter, high, None, PTX)
    if CALLS == 2:  # an even counter plus 1 has no carry
        v0, v1, v2, v3 = philox(seed, counter + 1, high, None, PTX)
        w0, w1, w2, w3 = tl.join(w0, v0), tl.join(w1, v1), tl.join(w2, v2), tl.join(w3, v3)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # in the order of the elements
    words = tl.reshape(words, [SIZE] if len(counter.shape) == 1 else [counter.shape[0], SIZE])
    return words > last.to(tl.uint32, bitcast=True)


@triton.jit
def _kept_in_tile(
    seed_ptr, last, BLOCK: tl.constexpr, CALLS: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Return the keep-mask of this program's tile of BLOCK elements."""
    # no tile crosses a multiple of 2**32 counters, and 32-bit products need no second half
    high = (tl.program_id(0).to(tl.int64) * (BLOCK // 4) >> 32).to(tl.uint32)
    low = tl.program_id(0).to(tl.uint32) * (BLOCK // 4)
    return _kept(tl.load(seed_ptr), low, high, last, BLOCK, CALLS, False, PTX)


@triton.jit
def philox(seed, c0, c1, position, PTX: tl.constexpr):
    """Return the four words (uint32) of Philox4x32-10 for each counter, by its halves (uint32).

    seed: int64. position: int64, the other half of the counter; None: 0.
    """
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    first = _product(c0, 0xD2511F53, PTX)
    if position is None:
        c0, c2 = c1 ^ k0, (first >> 32).to(tl.uint32) ^ k1
        c1, c3 = tl.zeros_like(c2), first.to(tl.uint32)
    else:
        second = _product(position.to(tl.uint32), 0xCD9E8D57, PTX)
        c2 = (first >> 32).to(tl.uint32) ^ (position >> 32).to(tl.uint32) ^ k1
        c0, c1 = tl.zeros_like(c2) + (second >> 32).to(tl.uint32) ^ c1 ^ k0, tl.zeros_like(c2) + second.to(tl.uint32)
        c3 = first.to(tl.uint32)
    for _ in tl.static_range(9):  # pyright: ignore[reportGeneralTypeIssues]
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
        first, second = _product(c0, 0xD2511F53, PTX), _product(c2, 0xCD9E8D57, PTX)
        c0, c2 = (second >> 32).to(tl.uint32) ^ c1 ^ k0, (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = second.to(tl.uint32), first.to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _product(a, FACTOR: tl.constexpr, PTX: tl.constexpr):
    """Return the 64 bits of a * FACTOR, of 32 bits each.

    PTX: by NVIDIA's instruction for it. LLVM widens what it can of the 32-bit operations between two of them to 64
    bits, and needs two instructions more for each Philox call of four elements.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            "mul.wide.u32 $0, $1, $2;", "=l,r,r", [a, tl.full([], FACTOR, tl.uint32)], tl.uint64, True, 1
        )
    return a.to(tl.uint64) * FACTOR

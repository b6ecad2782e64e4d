"""Gated activations in Triton: two launchers and four kernels.

    forward, rows             gate and up are two tensors, or the halves of packed rows
    forward, interleaved      gate and up are at the even and odd positions of one tensor
    backward, the same two    the gradients are written in the layout of gate and up

Common to all kernels:

- All arithmetic is in float32, and rounded once.
- The halves of packed rows are read where they are, and so are gate and up that are chunks of one tensor: a row stride
  each. Two contiguous tensors are one row, so that tiles are aligned and full for every width.
- Interleaved pairs are loaded and stored together, 16 bytes at a time, and separated in registers.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.dtypes import promoted
from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import read, reciprocal, scalar
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.bias._bias_gelu import gelu, gelu_slope
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div, gated_columns, gated_tile, power_of_two

# ---------------------------------------------------------------------------------------------------------- launchers


class Gelu(NamedTuple):
    """The settings of geglu: ``gelu(gate) * up``, in the form by "tanh" or by "erf"."""

    form: str


class Swish(NamedTuple):
    """The settings of swiglu: ``gate * sigmoid(alpha * gate) * (up + offset)``, clamped first unless limit is None."""

    limit: float | None
    alpha: float
    offset: float


def geglu(gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool) -> Tensor:
    """Compute the op for two tensors and for packed ones, of any shape and strides."""
    return gated_forward(gate, up, Gelu("tanh" if approximate == "tanh" else "erf"), interleaved)


def geglu_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    approximate: str,
    interleaved: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of gate and of up in one pass."""
    return gated_backward(grad, gate, up, Gelu("tanh" if approximate == "tanh" else "erf"), interleaved, needs)


def swiglu(
    gate: Tensor, up: Tensor | None, limit: float | None, alpha: float, offset: float, interleaved: bool
) -> Tensor:
    """Compute the op for two tensors and for packed ones, of any shape and strides."""
    return gated_forward(gate, up, Swish(limit, alpha, offset), interleaved)


def swiglu_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    limit: float | None,
    alpha: float,
    offset: float,
    interleaved: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of gate and of up in one pass."""
    return gated_backward(grad, gate, up, Swish(limit, alpha, offset), interleaved, needs)


def gated_forward(gate: Tensor, up: Tensor | None, activation: Swish | Gelu, interleaved: bool) -> Tensor:
    """Compute ``activation(gate) * up``.

    Args:
        gate: (..., H), or (..., 2H) without up; float16, bfloat16 or float32, any strides.
        up: the shape of gate, any of these dtypes, any strides; or None.
        activation: the function.
        interleaved: gate and up are at even and odd positions of a packed tensor.

    Returns:
        (..., H), contiguous, the promoted dtype.
    """
    dtype = promoted(gate, up)
    shape = gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)
    y = torch.empty(shape, dtype=dtype, device=gate.device)
    if y.numel() == 0:
        return y
    kind, numbers = _scalars(activation)
    if up is None and interleaved:
        launch = _pairs_launch(False, y.numel(), y.element_size(), kind)
        launch(y, y, gate.resolve_neg().contiguous(), *numbers)
        return y
    g, u = _rows(*((gate, up) if up is not None else _halves(gate)))
    narrowest = min(g.element_size(), u.element_size())
    n_rows, width, strides = _layout(y.shape[-1] if y.dim() else 1, y.numel(), (g, u))
    launch = _rows_launch(False, n_rows, width, strides, narrowest, kind)
    launch(y, y, g, u, *numbers)
    return y


def gated_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, activation: Swish | Gelu, interleaved: bool, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of gate and of up, each in its dtype; None for one that is not wanted.

    Args:
        grad: (..., H), the promoted dtype, any strides.
        gate: as in the forward.
        up: as in the forward.
        activation: as in the forward.
        interleaved: as in the forward.
        needs: (gradient of gate is wanted, gradient of up is wanted).
    """
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format) if needs[0] else None
    dup = torch.empty_like(up, memory_format=torch.contiguous_format) if up is not None and needs[1] else None
    if grad.numel() == 0 or (dgate is None and dup is None):
        return dgate, dup
    kind, numbers = _scalars(activation)
    grad = grad.resolve_neg().contiguous()
    if up is None and interleaved:
        launch = _pairs_launch(True, grad.numel(), grad.element_size(), kind)
        launch(grad, dgate, grad, gate.resolve_neg().contiguous(), *numbers)
        return dgate, None
    g, u = _rows(*((gate, up) if up is not None else _halves(gate)))
    dg, du = (dgate, dup) if up is not None or dgate is None else _halves(dgate)
    narrowest = min(g.element_size(), u.element_size())
    width = grad.shape[-1] if grad.dim() else 1
    n_rows, width, strides = _layout(width, grad.numel(), (g, u, dg, du))
    launch = _rows_launch(True, n_rows, width, strides, narrowest, kind)
    launch(grad, dg, du, grad, g, u, *numbers)
    return dgate, dup


def _scalars(activation: Swish | Gelu) -> tuple[str, tuple[float, ...]]:
    """Return the name of the function in the kernels, and the scalar arguments."""
    if isinstance(activation, Gelu):
        return activation.form, (0.0,) * 3
    clamped = activation.limit is not None
    numbers = (activation.limit if clamped else 0.0, activation.alpha, activation.offset)
    return "clamped" if clamped else "swish", tuple([float(value) for value in numbers])


def _halves(packed: Tensor) -> tuple[Tensor, Tensor]:
    width = packed.shape[-1] // 2
    return packed[..., :width], packed[..., width:]


def _rows(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as (rows, H) with contiguous rows. Copied unless the rows of a tensor have one stride."""
    return _as_rows(gate), _as_rows(up)


def _as_rows(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_neg()
    width = tensor.shape[-1] if tensor.dim() else 1
    if tensor.is_contiguous() or tensor.dim() < 2 or tensor.stride(-1) != 1:
        return tensor.contiguous().view(-1, width)
    stride = tensor.stride(-2)
    for dim in range(tensor.dim() - 2, 0, -1):
        if tensor.shape[dim - 1] > 1 and tensor.stride(dim - 1) != tensor.stride(dim) * tensor.shape[dim]:
            return tensor.contiguous().view(-1, width)
    if stride < width:  # expanded or overlapping rows
        return tensor.contiguous().view(-1, width)
    return tensor.as_strided((tensor.numel() // width, width), (stride, 1))


def _layout(width: int, n: int, tensors: tuple[Tensor | None, ...]) -> tuple[int, int, tuple[int, ...]]:
    """Return the number of rows, their width, and each tensor's row stride: one row where all are contiguous."""
    strides = tuple([width if t is None or t.is_contiguous() else t.stride(-2) for t in tensors])
    if all(stride == width for stride in strides):
        return 1, n, (n,) * len(tensors)
    return n // width, width, strides


@cached_by_layout
def _rows_launch(
    backward: bool, n_rows: int, width: int, strides: tuple[int, ...], narrowest: int, kind: str
) -> Launch:
    """Return the launch of ``_forward_rows`` or ``_backward_rows``."""
    kernel, row_unit = (_backward_rows if backward else _forward_rows), unit(gcd(width, *strides))
    sizes = (n_rows, width // row_unit, *[stride // row_unit for stride in strides])
    setting = gated_tile(narrowest, backward)
    cols = gated_columns(width, setting.block, narrowest)
    rows = min(setting.block // cols, power_of_two(n_rows))
    constants: dict[str, Any] = {
        "KIND": kind, "ONE": n_rows == 1, "UNIT": row_unit, "EVEN": width % cols == 0 and n_rows % rows == 0,
        "ROWS": rows, "COLS": cols,
    }  # fmt: skip
    return Launch(kernel, (ceil_div(width, cols) * ceil_div(n_rows, rows),), sizes, constants, setting.warps)


@cached_by_layout
def _pairs_launch(backward: bool, n: int, element_size: int, kind: str) -> Launch:
    """Return the launch of ``_forward_pairs`` or ``_backward_pairs`` for n pairs."""
    kernel, unit_n = (_backward_pairs if backward else _forward_pairs), unit(n)
    setting = gated_tile(element_size, backward)
    constants = {"KIND": kind, "UNIT_N": unit_n, "BLOCK": setting.block}
    return Launch(kernel, (ceil_div(n, setting.block),), (n // unit_n,), constants, setting.warps)


# ------------------------------------------------------------------------------------------------------------ kernels
# Triton does not specialise on any integer here: UNIT and UNIT_N give the compiler the alignment.


@profiled(do_not_specialize=["limit", "alpha", "offset", "n_rows", "size", "gate_stride", "up_stride"])
def _forward_rows(
    y_ptr, gate_ptr, up_ptr, limit, alpha, offset, n_rows, size, gate_stride, up_stride,
    KIND: tl.constexpr, ONE: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS * COLS elements. Grid (cdiv(H, COLS) * cdiv(n_rows, ROWS),), H = size * UNIT.

    y_ptr: (n_rows, H), contiguous. gate_ptr, up_ptr: (n_rows, H), strides (stride * UNIT, 1).
    """
    row, col, columns, inside = _tile(n_rows, size, ONE, UNIT, EVEN, ROWS, COLS)
    gate = read(gate_ptr + _at(row, col, gate_stride, UNIT), inside)
    up = read(up_ptr + _at(row, col, up_stride, UNIT), inside)
    y = activated(gate, up, scalar(limit), scalar(alpha), scalar(offset), KIND)
    tl.store(y_ptr + row[:, None] * columns + col[None, :], rounded(y, y_ptr), mask=inside)


@profiled(
    do_not_specialize=[
        "limit", "alpha", "offset", "n_rows", "size", "gate_stride", "up_stride", "dgate_stride", "dup_stride"
    ]
)  # fmt: skip
def _backward_rows(
    dgate_ptr, dup_ptr, grad_ptr, gate_ptr, up_ptr, limit, alpha, offset,
    n_rows, size, gate_stride, up_stride, dgate_stride, dup_stride,
    KIND: tl.constexpr, ONE: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Write ROWS * COLS elements of each gradient; dgate_ptr or dup_ptr can be None. Grid as in ``_forward_rows``.

    grad_ptr: (n_rows, H), contiguous. The others: (n_rows, H), strides (stride * UNIT, 1).
    """
    row, col, columns, inside = _tile(n_rows, size, ONE, UNIT, EVEN, ROWS, COLS)
    grad = read(grad_ptr + row[:, None] * columns + col[None, :], inside)
    gate = read(gate_ptr + _at(row, col, gate_stride, UNIT), inside)
    up = read(up_ptr + _at(row, col, up_stride, UNIT), inside)
    dgate, dup = gradients(grad, gate, up, scalar(limit), scalar(alpha), scalar(offset), KIND)
    if dgate_ptr is not None:
        tl.store(dgate_ptr + _at(row, col, dgate_stride, UNIT), rounded(dgate, dgate_ptr), mask=inside)
    if dup_ptr is not None:
        tl.store(dup_ptr + _at(row, col, dup_stride, UNIT), rounded(dup, dup_ptr), mask=inside)


@profiled(do_not_specialize=["limit", "alpha", "offset", "n"])
def _forward_pairs(
    y_ptr, packed_ptr, limit, alpha, offset, n,
    KIND: tl.constexpr, UNIT_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK elements. Grid (cdiv(n * UNIT_N, BLOCK),). y_ptr: (n * UNIT_N,). packed_ptr: (2 * n * UNIT_N,)."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = n.to(tl.int64) * UNIT_N - base
    at, both = tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK)
    packed = read(packed_ptr + 2 * base + both, both < 2 * left)
    gate, up = tl.split(tl.reshape(packed, [BLOCK, 2]))
    y = activated(gate, up, scalar(limit), scalar(alpha), scalar(offset), KIND)
    tl.store(y_ptr + base + at, rounded(y, y_ptr), mask=at < left)


@profiled(do_not_specialize=["limit", "alpha", "offset", "n"])
def _backward_pairs(
    dpacked_ptr, grad_ptr, packed_ptr, limit, alpha, offset, n,
    KIND: tl.constexpr, UNIT_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK pairs of the gradient. Arguments and grid as in ``_forward_pairs``."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    left = n.to(tl.int64) * UNIT_N - base
    at, both = tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK)
    packed = read(packed_ptr + 2 * base + both, both < 2 * left)
    grad = read(grad_ptr + base + at, at < left)
    gate, up = tl.split(tl.reshape(packed, [BLOCK, 2]))
    dgate, dup = gradients(grad, gate, up, scalar(limit), scalar(alpha), scalar(offset), KIND)
    dpacked = tl.reshape(tl.join(dgate, dup), [2 * BLOCK])
    tl.store(dpacked_ptr + 2 * base + both, rounded(dpacked, dpacked_ptr), mask=both < 2 * left)


# ------------------------------------------------------------------------------------------------- parts of a kernel


@triton.jit
def _tile(
    n_rows, size, ONE: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Return this program's rows and columns (64-bit), the number of columns, and which elements are inside.

    EVEN: all are. They are a constant then, which Triton removes from loads and stores. ONE: there is one row.
    """
    columns = size.to(tl.int64) * UNIT
    # a grid has fewer programs than 2**31, and a division of 64 bits takes four times the instructions
    tiles = ((columns + COLS - 1) // COLS).to(tl.uint32)
    program = tl.program_id(0).to(tl.uint32)
    row, col = tl.arange(0, ROWS).to(tl.int64), tl.arange(0, COLS).to(tl.int64)
    if ONE:
        col += program.to(tl.int64) * COLS
    else:
        row += (program // tiles).to(tl.int64) * ROWS
        col += (program % tiles).to(tl.int64) * COLS
    inside = tl.full([1, COLS], 1, tl.int1)
    if not EVEN:
        inside = (row < n_rows)[:, None] & (col < columns)[None, :]
    return row, col, columns, inside


@triton.jit
def _at(row, col, stride, UNIT: tl.constexpr):
    """Return the offsets of elements in a tensor of row stride ``stride * UNIT``."""
    return row[:, None] * (stride.to(tl.int64) * UNIT) + col[None, :]


@triton.jit
def activated(gate, up, limit, alpha, offset, KIND: tl.constexpr):
    """Compute the function of gate and up, float32. KIND: "swish", "clamped", "tanh" or "erf"."""
    if KIND == "tanh" or KIND == "erf":
        return gelu(tl.where(gate < -32.0, -32.0, gate), KIND == "tanh") * up  # -inf * 0 would be NaN
    if KIND == "clamped":
        gate, up = _clamped(gate, up, limit)
    s, _ = logistic(alpha * gate)
    return times(gate, s) * (up + offset)


@triton.jit
def gradients(grad, gate, up, limit, alpha, offset, KIND: tl.constexpr):
    """Compute the gradients of gate and up. At a bound of the clamp they pass. Beyond it they are 0, for any grad."""
    if KIND == "tanh" or KIND == "erf":
        gate = tl.where(gate < -32.0, -32.0, gate)
        # beyond 32 the derivative is 1; an infinite gate would give NaN
        slope = gelu_slope(tl.where(gate > 32.0, 32.0, gate), KIND == "tanh")
        return grad * (up * slope), grad * gelu(gate, KIND == "tanh")
    gate_passes, up_passes = gate <= limit, tl.abs(up) <= limit
    if KIND == "clamped":
        gate, up = _clamped(gate, up, limit)
    s, rest = logistic(alpha * gate)
    swish = times(gate, s)
    dgate, dup = grad * ((up + offset) * (s + swish * (alpha * rest))), grad * swish
    if KIND == "clamped":
        dgate, dup = tl.where(gate_passes, dgate, 0.0), tl.where(up_passes, dup, 0.0)
    return dgate, dup


@triton.jit
def _clamped(gate, up, limit):
    """Return gate, at most ``limit``, and up, between -limit and limit. NaN stays NaN."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate, tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def times(gate, s):
    """Compute gate * s, 0 where s is 0: -inf * 0 would be NaN."""
    return tl.where(s == 0, 0.0, gate * s)


@triton.jit
def logistic(t):
    """Return 1 / (1 + exp(-t)) and 1 / (1 + exp(t)). exp(-|t|) does not overflow."""
    e = tl.exp2(-1.4426950408889634 * tl.abs(t))
    r = reciprocal(1.0 + e)
    return tl.where(t > 0, r, e * r), tl.where(t > 0, e * r, r)

"""The launchers of swiglu and geglu (``src/elementwise/gated.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall

Activation = tuple[float, float, float]

#: The codes of the functions, as ``src/api.h`` has them.
SWISH, GELU_TANH, GELU_ERF = range(3)


def gated_forward(
    gate: Tensor, up: Tensor | None, interleaved: bool, activation: int, limit: float, alpha: float, offset: float
) -> LibraryCall:
    """Return the call that computes ``f(gate) * up``.

    Args:
        gate: (..., H), float32, bfloat16 or float16, any strides; (..., 2H) without up.
        up: the shape and dtype of gate, any strides, or None.
        interleaved: gate and up are at even and odd positions of a packed tensor.
        activation: SWISH, GELU_TANH or GELU_ERF.
        limit: of SWISH; NaN for none.
        alpha: of SWISH.
        offset: of SWISH.

    Its result: (..., H), contiguous, the dtype of gate. Computed in float32, rounded once.
    """
    gate, up, rows, columns, gate_row, up_row = _rows(gate, up, interleaved)
    if up is None:
        y = gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
        up_at = None if interleaved else (gate, columns * gate.element_size())
    else:
        y = torch.empty_like(gate, memory_format=torch.contiguous_format)
        up_at = up
    dtype = DTYPE_CODES[gate.dtype]
    fields = (gate, up_at, y, dtype, rows, columns, activation, gate_row, up_row, limit, alpha, offset)
    return LibraryCall(library().gated_forward, fields, y)


def gated_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    interleaved: bool,
    activation: int,
    limit: float,
    alpha: float,
    offset: float,
    needs: tuple[bool, ...],
) -> LibraryCall:
    """Return the call that computes the gradients of gate and up, contiguous, of their dtype; None where not wanted.

    Args:
        grad: (..., H), the dtype of gate, any strides.
        gate: as in the forward.
        up: as in the forward.
        interleaved: as in the forward.
        activation: as in the forward.
        limit: as in the forward.
        alpha: as in the forward.
        offset: as in the forward.
        needs: the gradient of gate is wanted; that of up is wanted.
    """
    grad = dense(grad)
    gate, up, rows, columns, gate_row, up_row = _rows(gate, up, interleaved)
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format) if needs[0] else None
    dup = None
    if up is None:
        half = columns * gate.element_size()
        up_at = None if interleaved else (gate, half)
        dup_at = None if interleaved or dgate is None else (dgate, half)
        gradient_row = 2 * columns
    else:
        dup = torch.empty_like(up, memory_format=torch.contiguous_format) if needs[1] else None
        up_at, dup_at = up, dup
        gradient_row = columns
    sizes = (rows, columns, activation, gate_row, up_row, gradient_row)
    fields = (grad, gate, up_at, dgate, dup_at, DTYPE_CODES[gate.dtype], *sizes, limit, alpha, offset)
    return LibraryCall(library().gated_backward, fields, (dgate, dup))


def _rows(gate: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor | None, int, int, int, int]:
    """Return gate, up, the number of rows, the columns of y, and the elements between rows of gate and of up.

    Tensors whose rows are contiguous, such as the two chunks of a packed one, are read where they are.
    """
    if up is None and interleaved:
        gate = dense(gate)
        return gate, None, 1, gate.numel() // 2, 0, 0
    if up is None:
        gate, row = with_rows(gate)
        width = gate.shape[-1]
        return gate, None, gate.numel() // (width or 1), width // 2, row, row
    if gate.is_contiguous() and up.is_contiguous():
        return dense(gate), dense(up), 1, gate.numel(), 0, 0
    (gate, gate_row), (up, up_row) = with_rows(gate), with_rows(up)
    columns = gate.shape[-1]
    return gate, up, gate.numel() // (columns or 1), columns, gate_row, up_row


def with_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the tensor, or a contiguous copy, and the elements from one row to the next."""
    if tensor.is_contiguous():
        return dense(tensor), tensor.shape[-1]
    shape, strides = tensor.shape, tensor.stride()
    outer = zip(shape[:-2], strides[:-2], strides[1:-1], shape[1:-1], strict=True)
    one_stride = all(size == 1 or stride == inner * count for size, stride, inner, count in outer)
    if one_stride and strides[-1] == 1 and not tensor.is_neg():
        return tensor, strides[-2]
    return dense(tensor), shape[-1]

"""gated_rms_norm in the compiled library (``src/elementwise/gated_norm.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import ops
from fusedops_cpu._calls import library_kernel
from fusedops_cpu._constraints import any_dtype, one_dtype
from fusedops_cpu._gated import with_rows
from fusedops_cpu._library import DTYPE_CODES, dense, library
from fusedops_cpu._struct_call import LibraryCall

_CONSTRAINTS = (*one_dtype("x", "gate"), *any_dtype("weight"))
_SOURCE = "fusedops_cpu/src/elementwise/gated_norm.cpp"


@library_kernel(
    ops.gated_rms_norm,
    *_CONSTRAINTS,
    source=_SOURCE,
    rows_independent=True,
)
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    gate_first: bool,
    activation: str,
    groups: int,
    offset: float,
    save: bool,
) -> LibraryCall:
    """Compute the op; x and gate of one dtype, any rank and strides, a weight of any dtype of the library."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rstd = x.new_empty((*x.shape[:-1], groups), dtype=torch.float32) if save else None
    weight = weight if weight is None else dense(weight)
    (x, x_row), (gate, gate_row) = with_rows(x), with_rows(gate)
    sizes = _sizes(x, weight, groups, x_row, gate_row, gate_first, activation)
    fields = (x, gate, weight, y, rstd, *sizes, eps, offset)
    return LibraryCall(library().gated_norm_forward, fields, (y, rstd))


@library_kernel(
    ops.gated_rms_norm,
    *_CONSTRAINTS,
    direction="backward",
    source=_SOURCE,
    rows_independent=True,
)
def gated_rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    gate_first: bool,
    activation: str,
    groups: int,
    offset: float,
    needs: tuple[bool, ...],
) -> LibraryCall | tuple[Tensor | None, ...]:
    """Compute the gradients of x, gate and weight; the sum for the weight does not depend on the number of threads."""
    weight = weight if weight is None else dense(weight)
    wanted = zip((x, gate, weight), needs)
    gradients = tuple(
        torch.empty_like(each, memory_format=torch.contiguous_format) if each is not None and need else None
        for each, need in wanted
    )
    if not x.numel():
        return tuple(None if each is None else each.zero_() for each in gradients)
    (x, x_row), (gate, gate_row) = with_rows(x), with_rows(gate)
    sizes = _sizes(x, weight, groups, x_row, gate_row, gate_first, activation)
    fields = (dense(grad), x, gate, weight, dense(rstd), *gradients, *sizes, offset)
    return LibraryCall(library().gated_norm_backward, fields, gradients)


def _sizes(
    x: Tensor, weight: Tensor | None, groups: int, x_row: int, gate_row: int, gate_first: bool, activation: str
) -> tuple[int, ...]:
    """Return the integers of the structs in ``src/api.h``."""
    shape = x.shape
    columns = shape[-1] // groups
    rows = shape[:-1].numel()
    dtypes = (DTYPE_CODES[x.dtype], 0 if weight is None else DTYPE_CODES[weight.dtype])
    return (*dtypes, rows, groups, columns, x_row, gate_row, int(gate_first), int(activation == "sigmoid"))

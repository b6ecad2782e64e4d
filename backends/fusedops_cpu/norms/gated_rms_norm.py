"""gated_rms_norm in the compiled library (``src/elementwise/gated_norm.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import ops
from fusedops.ops.norms.arguments import GatedRmsNormArgs, GatedRmsNormGradArgs
from fusedops_cpu._constraints import any_dtype, one_dtype
from fusedops_cpu.gated._gated import with_rows
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall

_CONSTRAINTS = (*one_dtype("x", "gate"), *any_dtype("weight"))
_SOURCE = "fusedops_cpu/src/elementwise/gated_norm.cpp"


@library_kernel(
    ops.gated_rms_norm,
    *_CONSTRAINTS,
    source=_SOURCE,
    rows_independent=True,
)
def gated_rms_norm(a: GatedRmsNormArgs, save: bool) -> LibraryCall:
    """Compute the op; x and gate of one dtype, any rank and strides, a weight of any dtype of the library."""
    y = torch.empty_like(a.x, memory_format=torch.contiguous_format)
    rstd = a.x.new_empty((*a.x.shape[:-1], a.groups), dtype=torch.float32) if save else None
    weight = a.weight if a.weight is None else dense(a.weight)
    (x, x_row), (gate, gate_row) = with_rows(a.x), with_rows(a.gate)
    sizes = _sizes(x, weight, a.groups, x_row, gate_row, a.gate_first, a.activation)
    fields = (x, gate, weight, y, rstd, *sizes, a.eps, a.offset)
    return LibraryCall(library().gated_norm_forward, fields, (y, rstd))


@library_kernel(
    ops.gated_rms_norm,
    *_CONSTRAINTS,
    direction="backward",
    source=_SOURCE,
    rows_independent=True,
)
def gated_rms_norm_backward(a: GatedRmsNormGradArgs) -> LibraryCall | tuple[Tensor | None, ...]:
    """Compute the gradients of x, gate and weight; the sum for the weight does not depend on the number of threads."""
    weight = a.weight if a.weight is None else dense(a.weight)
    wanted = zip((a.x, a.gate, weight), a.needs)
    gradients = tuple(
        torch.empty_like(each, memory_format=torch.contiguous_format) if each is not None and need else None
        for each, need in wanted
    )
    if not a.x.numel():
        return tuple(None if each is None else each.zero_() for each in gradients)
    (x, x_row), (gate, gate_row) = with_rows(a.x), with_rows(a.gate)
    sizes = _sizes(x, weight, a.groups, x_row, gate_row, a.gate_first, a.activation)
    fields = (dense(a.grad), x, gate, weight, dense(a.rstd), *gradients, *sizes, a.offset)
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

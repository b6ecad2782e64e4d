"""merge_attention in the compiled library (``src/elementwise/merge.cpp``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import ops
from fusedops.constraints import DType
from fusedops_cpu._constraints import one_dtype
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall

_LIMITS = (*one_dtype("out_a", "out_b"), DType("lse_a", torch.float32), DType("lse_b", torch.float32))
_SOURCE = "fusedops_cpu/src/elementwise/merge.cpp"


@library_kernel(
    ops.merge_attention,
    *_LIMITS,
    source=_SOURCE,
    rows_independent=True,
)
def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> LibraryCall:
    """Compute the op in one pass; out_a and out_b of one dtype, any rank and strides."""
    out, lse = _like(out_a), torch.empty_like(lse_a, memory_format=torch.contiguous_format)
    a, b = _as_4d(out_a), _as_4d(out_b)
    fields = (a, b, dense(lse_a), dense(lse_b), out, lse, *_sizes(a, b, _as_4d(out)))
    return LibraryCall(library().merge_forward, fields, (out, lse))


@library_kernel(
    ops.merge_attention,
    *_LIMITS,
    direction="backward",
    source=_SOURCE,
    rows_independent=True,
)
def merge_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    needs: tuple[bool, ...],
) -> LibraryCall:
    """Compute the four gradients in one pass, each where it is wanted."""
    a, b, grad = _as_4d(out_a), _as_4d(out_b), _as_4d(grad_out)
    da, db = (_like(own) if need else None for own, need in ((out_a, needs[0]), (out_b, needs[2])))
    dlse_a, dlse_b = (
        torch.empty_like(own, memory_format=torch.contiguous_format) if need else None
        for own, need in ((lse_a, needs[1]), (lse_b, needs[3]))
    )
    strides = [(0, 0, 0) if each is None else _as_4d(each).stride()[:3] for each in (da, db)]
    fields = (
        *(grad, dense(grad_lse), a, b, dense(lse_a), dense(lse_b), da, db, dlse_a, dlse_b),
        *(*_sizes(a, b, grad), *strides[0], *strides[1]),
    )
    return LibraryCall(library().merge_backward, fields, (da, dlse_a, db, dlse_b))


def _like(tensor: Tensor) -> Tensor:
    """Return an empty tensor whose dims in memory have the order of those of ``tensor``, where the library has them."""
    if tensor.dim() <= 4:
        empty = torch.empty_like(tensor)
        if empty.stride(-1) == 1:
            return empty
    return tensor.new_empty(tensor.shape)


def _as_4d(tensor: Tensor) -> Tensor:
    """Return a view with four dims, the last one contiguous; a copy where there is none."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    shape = tensor.shape
    if len(shape) > 4:
        return tensor.reshape(1, 1, shape[:-1].numel(), shape[-1])
    return tensor if len(shape) == 4 else tensor[(None,) * (4 - len(shape))]


def _sizes(a: Tensor, b: Tensor, out: Tensor) -> tuple[int, ...]:
    """Return the fields of MergeSizes."""
    return (DTYPE_CODES[a.dtype], *a.shape, *a.stride()[:3], *b.stride()[:3], *out.stride()[:3])

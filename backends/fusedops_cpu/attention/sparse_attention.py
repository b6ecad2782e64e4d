"""sparse_attention in the compiled library (``src/dot/attention_sparse.h``): chosen keys are read where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import ops
from fusedops.constraints import DType
from fusedops.ops.attention.arguments import SparseAttentionArgs, SparseAttentionGradArgs
from fusedops_cpu.attention.attention import empty_of, rows_of, sizes_of
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall

_DTYPES = DType("q", *DTYPE_CODES)
_SOURCE = "fusedops_cpu/src/dot/attention_sparse.h"


@library_kernel(ops.sparse_attention, _DTYPES, source=_SOURCE, rows_independent=True)
def sparse_attention(a: SparseAttentionArgs) -> LibraryCall | tuple[Tensor, Tensor]:
    """Compute the op; a key is read once for all query heads that share it."""
    q, k, v = rows_of(a.q), rows_of(a.k), rows_of(a.v)
    out, lse = empty_of(q, v.shape[3]), q.new_empty(*q.shape[:3], dtype=torch.float32)
    if not v.shape[2]:
        return out.zero_(), lse.fill_(-torch.inf)
    if not lse.numel():
        return out, lse
    sizes = sizes_of(q, k, v, a.mask, out, a.scale, a.causal, a.window)
    fields = (q, k, v, a.mask, out, lse, *_chosen(a.indices), *sizes)
    return LibraryCall(library().sparse_attention, fields, (out, lse))


@library_kernel(ops.sparse_attention, _DTYPES, direction="backward", source=_SOURCE, rows_independent=True)
def sparse_attention_backward(a: SparseAttentionGradArgs) -> LibraryCall | tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v from the scores, which are computed again."""
    q, k, v, grad = rows_of(a.q), rows_of(a.k), rows_of(a.v), rows_of(a.grad_out)
    gradients = [torch.empty_like(tensor) if need else None for tensor, need in zip((q, k, v), a.needs)]
    if not (a.lse.numel() and v.shape[2]):
        return tuple(gradient if gradient is None else gradient.zero_() for gradient in gradients)
    sizes = sizes_of(q, k, v, a.mask, grad, a.scale, a.causal, a.window)
    strides = [(0, 0, 0) if gradient is None else gradient.stride()[:3] for gradient in gradients]
    of_lse = dense(a.grad_lse) if a.return_lse else None
    fields = (q, k, v, a.mask, grad, of_lse, *gradients, *_chosen(a.indices), *sizes)
    fields = (*fields, *strides[0], *strides[1], *strides[2])
    return LibraryCall(library().sparse_attention_backward, fields, tuple(gradients))


def _chosen(indices: Tensor) -> tuple[Tensor | int, ...]:
    """Return the fields of ChosenKeys."""
    indices = indices.resolve_neg()
    batch, head, query, key = indices.stride()
    strides = (batch, head if indices.shape[1] > 1 else 0, query, key)
    return (indices, indices.dtype.itemsize, indices.shape[3], *strides)

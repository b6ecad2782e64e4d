"""select_keys in the compiled library (``src/dot/select_keys.h``): scores of some queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import masks, ops
from fusedops.ops.attention.arguments import SelectKeysArgs
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu.attention.paged_attention import contiguous_last
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall


@library_kernel(
    ops.select_keys,
    *any_dtype("q", "weights"),
    source="fusedops_cpu/src/dot/select_keys.h",
    rows_independent=True,
)
def select_keys(a: SelectKeysArgs) -> LibraryCall | Tensor:
    """Compute the op for any strides."""
    q, k = contiguous_last(a.q), contiguous_last(a.k)
    batch, queries, heads, size = q.shape
    keys = k.shape[1]
    index = q.new_empty((batch, queries, a.count), dtype=torch.int32)
    if not index.numel():
        return index
    if not keys:
        return index.fill_(-1)
    if not heads:  # each score is 0
        return index.copy_(ops.OPS["select_keys"].reference(*a))
    strides = (0, 0, 0) if a.mask is None else a.mask.expand(batch, queries, keys).stride()
    _, high = masks.band(queries, keys, a.causal, None)
    sizes = (DTYPE_CODES[q.dtype], DTYPE_CODES[a.weights.dtype], batch, queries, heads, keys, size, a.count)
    fields = (q, k, dense(a.weights), a.mask, index, *sizes, *q.stride()[:3], *k.stride()[:2], *strides)
    return LibraryCall(library().select_keys, (*fields, keys if high is None else high, a.scale), index)

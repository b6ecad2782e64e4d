"""Attention, of packed sequences too, the merge of two results, and the choice of keys."""

from fusedops import kernels_of
from fusedops_cpu.attention import (
    attention,
    merge_attention,
    paged_attention,
    select_keys,
    sparse_attention,
    store_kv,
    varlen_attention,
)

KERNELS = kernels_of(
    attention, merge_attention, paged_attention, select_keys, sparse_attention, store_kv, varlen_attention
)

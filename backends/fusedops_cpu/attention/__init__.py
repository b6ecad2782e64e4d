"""Attention, of packed sequences too, and the merge of two results."""

from fusedops import kernels_of
from fusedops_cpu.attention import attention, merge_attention, paged_attention, store_kv, varlen_attention

KERNELS = kernels_of(attention, merge_attention, paged_attention, store_kv, varlen_attention)

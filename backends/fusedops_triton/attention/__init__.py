"""Attention, of packed sequences too, and the merge of two results."""

from fusedops import kernels_of
from fusedops_triton.attention import merge_attention

KERNELS = kernels_of(merge_attention)

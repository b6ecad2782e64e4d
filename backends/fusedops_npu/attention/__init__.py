"""Attention, of packed sequences too, and the merge of two results."""

from fusedops import kernels_of
from fusedops_npu.attention import attention, varlen_attention

KERNELS = kernels_of(attention, varlen_attention)

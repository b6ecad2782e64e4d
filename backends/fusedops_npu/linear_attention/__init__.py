"""Linear attention."""

from fusedops import kernels_of
from fusedops_npu.linear_attention import linear_attention

KERNELS = kernels_of(linear_attention)

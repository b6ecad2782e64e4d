"""Linear attention."""

from fusedops import kernels_of
from fusedops_triton.linear_attention import linear_attention

KERNELS = kernels_of(linear_attention)

"""Linear attention."""

from fusedops import kernels_of
from fusedops_eager.linear_attention import linear_attention

KERNELS = kernels_of(linear_attention)

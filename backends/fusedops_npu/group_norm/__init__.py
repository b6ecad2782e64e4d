"""GroupNorm."""

from fusedops import kernels_of
from fusedops_npu.group_norm import group_norm

KERNELS = kernels_of(group_norm)

"""GroupNorm."""

from fusedops import kernels_of
from fusedops_cpu.group_norm import group_norm

KERNELS = kernels_of(group_norm)

"""The losses."""

from fusedops import kernels_of
from fusedops_npu.losses import cross_entropy

KERNELS = kernels_of(cross_entropy)

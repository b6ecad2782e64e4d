"""The linear layer."""

from fusedops import kernels_of
from fusedops_cpu.linear import linear

KERNELS = kernels_of(linear)

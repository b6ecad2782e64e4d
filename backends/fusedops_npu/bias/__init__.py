"""A bias with GELU or dropout."""

from fusedops import kernels_of
from fusedops_npu.bias import bias_gelu

KERNELS = kernels_of(bias_gelu)

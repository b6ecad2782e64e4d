"""The scaled masked softmax."""

from fusedops import kernels_of
from fusedops_npu.softmax import scaled_masked_softmax

KERNELS = kernels_of(scaled_masked_softmax)

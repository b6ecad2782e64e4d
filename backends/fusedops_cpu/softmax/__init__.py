"""The scaled masked softmax."""

from fusedops import kernels_of
from fusedops_cpu.softmax import scaled_masked_softmax

KERNELS = kernels_of(scaled_masked_softmax)

"""The scaled masked softmax."""

from fusedops import kernels_of
from fusedops_triton.softmax import scaled_masked_softmax

KERNELS = kernels_of(scaled_masked_softmax)

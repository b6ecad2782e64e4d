"""The causal convolution."""

from fusedops import kernels_of
from fusedops_eager.convolution import causal_conv1d

KERNELS = kernels_of(causal_conv1d)

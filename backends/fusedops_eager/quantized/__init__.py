"""The linear layer with packed weights."""

from fusedops import kernels_of
from fusedops_eager.quantized import quantized_linear

KERNELS = kernels_of(quantized_linear)

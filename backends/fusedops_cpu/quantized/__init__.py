"""The linear layers with packed weights."""

from fusedops import kernels_of
from fusedops_cpu.quantized import int8_linear, quantized_linear

KERNELS = kernels_of(int8_linear, quantized_linear)

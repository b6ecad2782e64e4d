"""Mixtures of experts."""

from fusedops import kernels_of
from fusedops_cpu.experts import experts, quantized_experts

KERNELS = kernels_of(experts, quantized_experts)

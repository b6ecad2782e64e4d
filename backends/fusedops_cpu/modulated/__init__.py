"""Modulated norms and gated residuals."""

from fusedops import kernels_of
from fusedops_cpu.modulated import gated_add, gated_add_modulated_norm, modulated_norm

KERNELS = kernels_of(gated_add, gated_add_modulated_norm, modulated_norm)

"""Activations without a gate."""

from fusedops import kernels_of
from fusedops_cpu.activations import squared_relu

KERNELS = kernels_of(squared_relu)

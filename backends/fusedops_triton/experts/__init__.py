"""Mixtures of experts."""

from fusedops import kernels_of
from fusedops_triton.experts import experts, grouped_matmul

KERNELS = kernels_of(experts, grouped_matmul)

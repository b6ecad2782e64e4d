"""Mixtures of experts."""

from fusedops import kernels_of
from fusedops_eager.experts import experts, grouped_matmul

KERNELS = kernels_of(experts, grouped_matmul)

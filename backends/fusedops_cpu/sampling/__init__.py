"""The draw of a token from logits."""

from fusedops import kernels_of
from fusedops_cpu.sampling import sample

KERNELS = kernels_of(sample)

"""The routing of tokens to experts."""

from fusedops import kernels_of
from fusedops_npu.routing import top_k_routing

KERNELS = kernels_of(top_k_routing)

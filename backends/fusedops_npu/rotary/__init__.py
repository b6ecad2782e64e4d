"""The rotary embedding."""

from fusedops import kernels_of
from fusedops_npu.rotary import rotary_embedding

KERNELS = kernels_of(rotary_embedding)

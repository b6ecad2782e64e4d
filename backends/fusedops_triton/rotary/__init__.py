"""The rotary embedding."""

from fusedops import kernels_of
from fusedops_triton.rotary import rotary_embedding

KERNELS = kernels_of(rotary_embedding)

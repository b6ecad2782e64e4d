"""RMSNorm and LayerNorm, with a residual or a gate."""

from fusedops import kernels_of
from fusedops_npu.norms import add_rms_norm, rms_norm

KERNELS = kernels_of(add_rms_norm, rms_norm)

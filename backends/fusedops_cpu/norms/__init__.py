"""RMSNorm and LayerNorm, with a residual or a gate."""

from fusedops import kernels_of
from fusedops_cpu.norms import add_layer_norm, add_rms_norm, gated_rms_norm, layer_norm, rms_norm

KERNELS = kernels_of(add_layer_norm, add_rms_norm, gated_rms_norm, layer_norm, rms_norm)

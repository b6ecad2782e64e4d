"""Gated activations."""

from fusedops import kernels_of
from fusedops_npu.gated import geglu, swiglu

KERNELS = kernels_of(geglu, swiglu)

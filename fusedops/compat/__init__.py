"""Replacements for functions of other libraries, with the original names, signatures and defaults.

from fusedops.compat.megatron import FusedScaleMaskSoftmax, bias_gelu_impl, get_bias_dropout_add
from fusedops.compat.slapo import bias_dropout, bias_new_gelu
"""

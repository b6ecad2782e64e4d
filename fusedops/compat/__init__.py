"""Drop-ins: other libraries' names, signatures and defaults over fusedops' ops. Import them by their own names.

from fusedops.compat.megatron import FusedScaleMaskSoftmax, bias_gelu_impl, get_bias_dropout_add
from fusedops.compat.slapo import bias_dropout, bias_new_gelu
"""

"""A bias with GELU or dropout."""

from fusedops import kernels_of
from fusedops_eager.bias import bias_dropout, bias_dropout_add, bias_gelu

KERNELS = kernels_of(bias_dropout, bias_dropout_add, bias_gelu)

"""The tolerances of norms that add a residual, where no error bound is at hand."""

import torch

from fusedops import Op, Tolerance

# of s, which is rounded to 16 bits: the norm of a row of nearly equal numbers magnifies it, and backward reads it
OUTPUTS = {torch.float16: Tolerance(4e-3, 2e-3), torch.bfloat16: Tolerance(3e-2, 1.6e-2)}
GRADIENTS = {torch.float16: Tolerance(2e-2, 4e-3), torch.bfloat16: Tolerance(1.5e-1, 3e-2)}


def rounds_a_sum(op: Op) -> bool:
    """Return True for a norm of ``x + residual``."""
    return "residual" in op.parameters and "rstd" in [value.name for value in op.saved]


def tolerance(op: Op, dtype: torch.dtype) -> Tolerance:
    """Return the tolerance of the op's outputs, without its error bounds."""
    allowed = op.evidence.tolerance[dtype]
    return OUTPUTS.get(dtype, allowed) if rounds_a_sum(op) else allowed


def gradient_tolerance(op: Op, dtype: torch.dtype) -> Tolerance:
    """Return the tolerance of the op's gradients, without its error bounds."""
    allowed = op.evidence.gradient_tolerance[dtype]
    return GRADIENTS.get(dtype, allowed) if rounds_a_sum(op) else allowed

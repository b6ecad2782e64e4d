"""The tolerance of the norms' gradients where no error bound is at hand."""

import torch

from fusedops import Op, Tolerance

# of s, which is rounded to 16 bits before backward reads it
ROUNDED = {torch.float16: Tolerance(2e-2, 4e-3), torch.bfloat16: Tolerance(1.5e-1, 3e-2)}


def gradient_tolerance(op: Op, dtype: torch.dtype) -> Tolerance:
    """Return the op's tolerance of gradients, or that of a rounded sum for an op that adds a residual."""
    allowed = op.evidence.gradient_tolerance[dtype]
    return ROUNDED.get(dtype, allowed) if "residual" in op.parameters else allowed

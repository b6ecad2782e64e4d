"""int8_linear in plain torch: the formula, without what gives the reference its gradient."""

from __future__ import annotations

from torch import Tensor

from fusedops.ops.quantized.int8_linear import Int8LinearArgs, exact


def int8_linear(a: Int8LinearArgs) -> Tensor:
    """Compute the op."""
    return exact(a).contiguous()

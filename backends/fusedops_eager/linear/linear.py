"""linear in plain torch: torch's own function where all tensors have one dtype, as it rounds once."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import no_autocast
from fusedops.ops.linear.linear import reference


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Compute the op; with an activation, or with several dtypes, in the dtype of the arithmetic."""
    if activation is None and weight.dtype is x.dtype and (bias is None or bias.dtype is x.dtype):
        with no_autocast(x.device.type):
            # beside a bias that is not contiguous it rounds the product too
            return torch.nn.functional.linear(x, weight, None if bias is None else bias.contiguous()).contiguous()
    return reference(x, weight, bias, activation).contiguous()

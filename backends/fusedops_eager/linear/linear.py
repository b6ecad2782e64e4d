"""linear in plain torch: its own function where all tensors have one dtype; in 16 bits that may round the product."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import is_narrow, no_autocast
from fusedops.ops.linear.linear import reference


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Compute the op; with an activation, or with several dtypes, in the dtype of the arithmetic."""
    if activation is None and _is_of_one_dtype(x, weight, bias):
        with no_autocast(x.device.type):
            return torch.nn.functional.linear(x, weight, bias).contiguous()
    return reference(x, weight, bias, activation).contiguous()


def rounding_before_bias(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor | None, ...]:
    """Return the rounding of the product to 16 bits before the bias is added: see ``extra_error`` of a kernel."""
    if bias is None or activation is not None or not is_narrow(x.dtype) or not _is_of_one_dtype(x, weight, bias):
        return (None,)
    return ((x.double() @ weight.double().mT).abs() * (torch.finfo(x.dtype).eps / 2),)


def _is_of_one_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return weight.dtype is x.dtype and (bias is None or bias.dtype is x.dtype)

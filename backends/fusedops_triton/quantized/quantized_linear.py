"""quantized_linear on Triton: the kernels with their constraints. The launchers are in ``_quantized.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import OneOf
from fusedops_triton._constraints import row_length, supported

#: Whose blocks have one scale, and a minimum, of 32 weights.
_FORMATS = OneOf("format", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
_OUTPUTS = row_length("packed", 0)
_SOURCE = "torch.mm, fusedops_triton/quantized/_quantized.py"
_ORDER = "a few rows are summed in another order than tiles of many, or than torch's products, by their number"


@kernel(
    ops.quantized_linear,
    *supported("x"),
    _FORMATS,
    _OUTPUTS,
    source=_SOURCE,
    rows_independent=_ORDER,
)
def quantized_linear(x: Tensor, packed: Tensor, bias: Tensor | None, format: str) -> Tensor:
    """Compute the op: a few rows of x from the packed bytes, many by tiles of 16-bit products or by torch's product."""
    from fusedops_triton.quantized._quantized import linear_forward  # imports triton, so not at module level

    return linear_forward(x, packed, bias, format)


@kernel(
    ops.quantized_linear,
    *supported("grad"),
    _FORMATS,
    _OUTPUTS,
    direction="backward",
    source=_SOURCE,
    rows_independent=_ORDER,
)
def quantized_linear_backward(
    grad: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    format: str,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x, by torch's products with chunks of the weight, and of bias."""
    from fusedops_triton.quantized._quantized import linear_backward

    return linear_backward(grad, packed, bias, format, needs)

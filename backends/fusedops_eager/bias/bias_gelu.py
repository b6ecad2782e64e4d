"""bias_gelu in plain torch, without constraints. The computation is in ``_gelu.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_eager._row_order import VECTORS
from fusedops_eager.bias._gelu import gelu_backward, gelu_forward


@kernel(
    ops.bias_gelu,
    source="fusedops_eager/bias/_gelu.py",
    rows_independent=VECTORS,
)
def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Compute the op on any device, for any rank and bias shape."""
    return gelu_forward(x, bias, approximate)


@kernel(
    ops.bias_gelu,
    direction="backward",
    source="fusedops_eager/bias/_gelu.py",
    rows_independent=VECTORS,
)
def bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and of the bias from the inputs."""
    return gelu_backward(grad, x, bias, approximate, needs)

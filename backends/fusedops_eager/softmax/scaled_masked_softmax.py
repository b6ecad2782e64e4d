"""scaled_masked_softmax in plain torch, without constraints. The computation is in ``_softmax.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_eager._row_order import VECTORS
from fusedops_eager.softmax._softmax import softmax_backward, softmax_forward


@kernel(
    ops.scaled_masked_softmax,
    source="fusedops_eager/softmax/_softmax.py",
    rows_independent=VECTORS,
)
def scaled_masked_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute the op on any device, for any rank, row length and mask shape."""
    return softmax_forward(x, mask, scale, causal)


@kernel(
    ops.scaled_masked_softmax,
    direction="backward",
    source="fusedops_eager/softmax/_softmax.py",
    rows_independent=VECTORS,
)
def scaled_masked_softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Compute the gradient of x from the saved y."""
    return softmax_backward(grad, y, scale, causal)

"""scaled_masked_softmax in plain torch: no limits. What it does is in ``_softmax.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_eager._softmax import softmax_backward, softmax_forward


@kernel(ops.scaled_masked_softmax, source="fusedops_eager/_softmax.py")
def scaled_masked_softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, causal: bool = False) -> Tensor:
    """Any device, rank, length and mask shape."""
    return softmax_forward(x, mask, scale, causal)


@kernel(ops.scaled_masked_softmax, direction="backward", source="fusedops_eager/_softmax.py")
def scaled_masked_softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """The gradient of x from the saved y."""
    return softmax_backward(grad, y, scale, causal)

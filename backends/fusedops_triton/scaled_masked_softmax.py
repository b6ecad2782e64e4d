"""scaled_masked_softmax on Triton: its limits, and the way to the launchers in ``_softmax.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Capability

# Triton itself supports NVIDIA GPUs from compute capability 8.0 (Ampere) on
_NEWEST = Capability("x", (8, 0))


@kernel(ops.scaled_masked_softmax, _NEWEST, source="fusedops_triton/_softmax.py")
def scaled_masked_softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, causal: bool = False) -> Tensor:
    """Any rank, row length, stride and mask shape."""
    from fusedops_triton._softmax import softmax_forward  # triton is imported by the first call, not before

    return softmax_forward(x, mask, scale, causal)


@kernel(ops.scaled_masked_softmax, Capability("y", (8, 0)), direction="backward", source="fusedops_triton/_softmax.py")
def scaled_masked_softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """The gradient of x from the saved y."""
    from fusedops_triton._softmax import softmax_backward

    return softmax_backward(grad, y, scale, causal)

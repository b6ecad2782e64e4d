"""bias_gelu on Triton: its limits, and the way to the launchers in ``_bias_gelu.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Capability

# Triton itself supports NVIDIA GPUs from compute capability 8.0 (Ampere) on
_NEWEST = Capability("x", (8, 0))


@kernel(ops.bias_gelu, _NEWEST, source="fusedops_triton/_bias_gelu.py")
def bias_gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """Any shape, stride and shape of bias, both forms."""
    from fusedops_triton._bias_gelu import gelu_forward  # triton is imported by the first call, not before

    return gelu_forward(x, bias, approximate)


@kernel(ops.bias_gelu, _NEWEST, direction="backward", source="fusedops_triton/_bias_gelu.py")
def bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and bias; that of a bias (H,) in the same pass."""
    from fusedops_triton._bias_gelu import gelu_backward

    return gelu_backward(grad, x, bias, approximate, needs)

"""bias_gelu on Triton: the kernels with their constraints. The launchers are in ``_bias_gelu.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_triton._constraints import supported

_CONSTRAINTS = supported("x", "bias")


@kernel(
    ops.bias_gelu,
    *_CONSTRAINTS,
    source="fusedops_triton/bias/_bias_gelu.py",
    rows_independent=True,
)
def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Compute the tanh form or the exact form for any shape, strides and bias shape."""
    from fusedops_triton.bias._bias_gelu import gelu_forward  # imports triton, so not at module level

    return gelu_forward(x, bias, approximate)


@kernel(
    ops.bias_gelu,
    *_CONSTRAINTS,
    direction="backward",
    source="fusedops_triton/bias/_bias_gelu.py",
    rows_independent=True,
)
def bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and of the bias. The gradient of a bias (H,) is computed in the same pass."""
    from fusedops_triton.bias._bias_gelu import gelu_backward

    return gelu_backward(grad, x, bias, approximate, needs)

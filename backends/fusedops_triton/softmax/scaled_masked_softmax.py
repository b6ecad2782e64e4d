"""scaled_masked_softmax on Triton: the kernels with their constraints. The launchers are in ``_softmax.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_triton._constraints import row_length, supported

_TWO_FORMS = "a program of several rows has two forms, by the number of rows, whose sums differ in the interpreter"


@kernel(
    ops.scaled_masked_softmax,
    *supported("x"),
    row_length("x"),
    source="fusedops_triton/softmax/_softmax.py",
    rows_independent=_TWO_FORMS,
)
def scaled_masked_softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute the op for any rank, row length, strides and mask shape."""
    from fusedops_triton.softmax._softmax import softmax_forward  # imports triton, so not at module level

    return softmax_forward(x, mask, scale, causal)


@kernel(
    ops.scaled_masked_softmax,
    *supported("y"),
    row_length("y"),
    direction="backward",
    source="fusedops_triton/softmax/_softmax.py",
    rows_independent=_TWO_FORMS,
)
def scaled_masked_softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Compute the gradient of x from the saved y."""
    from fusedops_triton.softmax._softmax import softmax_backward

    return softmax_backward(grad, y, scale, causal)

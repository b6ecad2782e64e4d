"""linear_cross_entropy on Triton: the kernels with their constraints. ``_linear_cross_entropy.py`` launches."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.losses.arguments import LinearCrossEntropyArgs, LinearCrossEntropyGradArgs
from fusedops.ops.losses.formulas import loss_and_gradients, scaled_gradients
from fusedops_triton._constraints import PRODUCTS, row_length, supported

_SOURCE = "torch.mm, fusedops_triton/losses/_linear_cross_entropy.py"
_CLASSES = row_length("weight", 0)


@kernel(
    ops.linear_cross_entropy,
    *supported("x", "weight"),
    _CLASSES,
    source=_SOURCE,
    rows_independent=PRODUCTS,
)
def linear_cross_entropy(
    a: LinearCrossEntropyArgs, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the loss in chunks of rows, and the gradients of its sum over the rows that are wanted."""
    from fusedops_triton.losses._linear_cross_entropy import row_losses  # imports triton, so not at module level

    return loss_and_gradients(row_losses, a, save)


@kernel(
    ops.linear_cross_entropy,
    *supported("x", "weight"),
    _CLASSES,
    direction="backward",
    source=_SOURCE,
    rows_independent=PRODUCTS,
)
def linear_cross_entropy_backward(a: LinearCrossEntropyGradArgs) -> tuple[Tensor | None, ...]:
    """Multiply the gradients of forward by the incoming one; compute again what forward could not."""
    from fusedops_triton.losses._linear_cross_entropy import row_losses
    from fusedops_triton.losses._scaled import scaled

    return scaled_gradients(row_losses, a, scaled)

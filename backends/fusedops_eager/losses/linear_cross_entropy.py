"""linear_cross_entropy in plain torch, without constraints. The computation is in ``_linear_cross_entropy.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.losses.arguments import LinearCrossEntropyArgs, LinearCrossEntropyGradArgs, check_targets
from fusedops.ops.losses.formulas import loss_and_gradients, scaled_gradients
from fusedops_eager._row_order import PRODUCTS
from fusedops_eager.losses._linear_cross_entropy import row_losses


@kernel(
    ops.linear_cross_entropy,
    source="torch.mm, fusedops_eager/losses/_linear_cross_entropy.py",
    rows_independent=PRODUCTS,
)
def linear_cross_entropy(
    a: LinearCrossEntropyArgs, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the loss in chunks of rows, and the gradients of its sum over the rows."""
    check_targets("linear_cross_entropy", a.target, a.ignore_index, a.weight.shape[0])
    return loss_and_gradients(row_losses, a, save)


@kernel(
    ops.linear_cross_entropy,
    direction="backward",
    source="fusedops_eager/losses/_linear_cross_entropy.py",
    rows_independent=PRODUCTS,
)
def linear_cross_entropy_backward(a: LinearCrossEntropyGradArgs) -> tuple[Tensor | None, ...]:
    """Multiply the gradients of forward by the incoming one; compute again what forward could not."""
    return scaled_gradients(row_losses, a)

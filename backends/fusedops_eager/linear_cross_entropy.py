"""linear_cross_entropy in plain torch, without constraints. The computation is in ``_linear_cross_entropy.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.losses.arguments import check_targets
from fusedops.ops.losses.formulas import LossOptions, loss_and_gradients, scaled_gradients
from fusedops_eager._linear_cross_entropy import row_losses
from fusedops_eager._row_order import PRODUCTS


@kernel(
    ops.linear_cross_entropy,
    source="torch.mm, fusedops_eager/_linear_cross_entropy.py",
    rows_independent=PRODUCTS,
)
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    denominator: Tensor | None,
    chunk: int | None,
    save: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the loss in chunks of rows, and the gradients of its sum over the rows."""
    check_targets("linear_cross_entropy", target, ignore_index, weight.shape[0])
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction, denominator)
    return loss_and_gradients(row_losses, x, weight, target, bias, options, chunk, save)


@kernel(
    ops.linear_cross_entropy,
    direction="backward",
    source="fusedops_eager/_linear_cross_entropy.py",
    rows_independent=PRODUCTS,
)
def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    x_grad: Tensor | None,
    weight_grad: Tensor | None,
    bias_grad: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    denominator: Tensor | None,
    chunk: int | None,
    reuse: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Multiply the gradients of forward by the incoming one; compute again what forward could not."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction, denominator)
    saved = (x_grad, weight_grad, bias_grad)
    return scaled_gradients(row_losses, grad, x, weight, target, bias, saved, options, chunk, reuse, needs)

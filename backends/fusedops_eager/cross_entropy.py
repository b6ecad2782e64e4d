"""cross_entropy in plain torch, without constraints. The computation is in ``_cross_entropy.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.losses.arguments import check_targets
from fusedops.ops.losses.formulas import LossOptions
from fusedops_eager._cross_entropy import cross_entropy_backward as backward
from fusedops_eager._cross_entropy import cross_entropy_forward as forward
from fusedops_eager._row_order import VECTORS, on_cpu


@kernel(
    ops.cross_entropy,
    source="fusedops_eager/_cross_entropy.py",
    rows_independent=on_cpu(),
)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    denominator: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor | None, None]:
    """Compute the op on any device, for any rank and dtype. log_prob is not kept: lse serves."""
    check_targets("cross_entropy", target, ignore_index, logits.shape[-1])
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction, denominator)
    return *forward(logits, target, options, save), None


@kernel(
    ops.cross_entropy,
    direction="backward",
    source="fusedops_eager/_cross_entropy.py",
    rows_independent=VECTORS,
)
def cross_entropy_backward(
    grad: Tensor,
    logits: Tensor,
    log_prob: Tensor | None,
    lse: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    denominator: Tensor | None,
) -> Tensor:
    """Compute the gradient of the logits."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction, denominator)
    return backward(grad, logits, lse, target, options)

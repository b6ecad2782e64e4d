"""cross_entropy on Triton: the kernels with their constraints. The launchers are in ``_cross_entropy.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.losses.formulas import LossOptions
from fusedops_triton._constraints import row_length, supported


@kernel(
    ops.cross_entropy,
    *supported("logits"),
    row_length("logits"),
    source="fusedops_triton/_cross_entropy.py",
    rows_independent=True,
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
    """Compute the op for any rank, number of classes and strides. log_prob is not kept: lse serves."""
    from fusedops_triton import _cross_entropy as launcher  # imports triton, so not at module level

    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction, denominator)
    return *launcher.cross_entropy_forward(logits, target, options, save), None


@kernel(
    ops.cross_entropy,
    *supported("logits"),
    row_length("logits"),
    direction="backward",
    source="fusedops_triton/_cross_entropy.py",
    rows_independent=True,
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
    from fusedops_triton import _cross_entropy as launcher

    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction, denominator)
    return launcher.cross_entropy_backward(grad, logits, lse, target, options)

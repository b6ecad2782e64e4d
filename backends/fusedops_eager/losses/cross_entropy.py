"""cross_entropy in plain torch, without constraints. The computation is in ``_cross_entropy.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.losses.arguments import CrossEntropyArgs, CrossEntropyGradArgs, check_targets
from fusedops_eager._row_order import VECTORS, on_cpu
from fusedops_eager.losses._cross_entropy import cross_entropy_backward as backward
from fusedops_eager.losses._cross_entropy import cross_entropy_forward as forward


@kernel(
    ops.cross_entropy,
    source="fusedops_eager/losses/_cross_entropy.py",
    rows_independent=on_cpu(),
)
def cross_entropy(a: CrossEntropyArgs, save: bool) -> tuple[Tensor, Tensor | None, None]:
    """Compute the op on any device, for any rank and dtype. log_prob is not kept: lse serves."""
    check_targets("cross_entropy", a.target, a.ignore_index, a.logits.shape[-1])
    return *forward(a.logits, a.target, a.options, save), None


@kernel(
    ops.cross_entropy,
    direction="backward",
    source="fusedops_eager/losses/_cross_entropy.py",
    rows_independent=VECTORS,
)
def cross_entropy_backward(a: CrossEntropyGradArgs) -> Tensor:
    """Compute the gradient of the logits."""
    return backward(a.grad, a.logits, a.lse, a.target, a.options)

"""cross_entropy on Triton: the kernels with their constraints. The launchers are in ``_cross_entropy.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.losses.arguments import CrossEntropyArgs, CrossEntropyGradArgs
from fusedops_triton._constraints import row_length, supported


@kernel(
    ops.cross_entropy,
    *supported("logits"),
    row_length("logits"),
    source="fusedops_triton/losses/_cross_entropy.py",
    rows_independent=True,
)
def cross_entropy(a: CrossEntropyArgs, save: bool) -> tuple[Tensor, Tensor | None, None]:
    """Compute the op for any rank, number of classes and strides. log_prob is not kept: lse serves."""
    from fusedops_triton.losses import _cross_entropy as launcher  # imports triton, so not at module level

    return *launcher.cross_entropy_forward(a.logits, a.target, a.options, save), None


@kernel(
    ops.cross_entropy,
    *supported("logits"),
    row_length("logits"),
    direction="backward",
    source="fusedops_triton/losses/_cross_entropy.py",
    rows_independent=True,
)
def cross_entropy_backward(a: CrossEntropyGradArgs) -> Tensor:
    """Compute the gradient of the logits."""
    from fusedops_triton.losses import _cross_entropy as launcher

    return launcher.cross_entropy_backward(a.grad, a.logits, a.lse, a.target, a.options)

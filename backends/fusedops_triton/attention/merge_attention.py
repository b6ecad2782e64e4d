"""merge_attention on Triton: the kernels with their constraints. ``_merge.py`` launches."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Dim
from fusedops_triton._constraints import supported

# a program holds whole rows
_CONSTRAINTS = (*supported("out_a", "lse_a", "out_b", "lse_b"), Dim("out_a", (-1,), at_most=4096))
_SOURCE = "fusedops_triton/attention/_merge.py"


@kernel(
    ops.merge_attention,
    *_CONSTRAINTS,
    source=_SOURCE,
    rows_independent=True,
)
def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the op in one pass for any rank, strides and dtypes."""
    from fusedops_triton.attention._merge import merge_forward  # imports triton, so not at module level

    return merge_forward(out_a, lse_a, out_b, lse_b)


@kernel(
    ops.merge_attention,
    *_CONSTRAINTS,
    direction="backward",
    source=_SOURCE,
    rows_independent=True,
)
def merge_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the four gradients in one pass, each where it is wanted."""
    from fusedops_triton.attention._merge import merge_backward

    return merge_backward(grad_out, grad_lse, out_a, lse_a, out_b, lse_b, needs)

"""gated_rms_norm on Triton: the kernels with their constraints. ``_gated_norm.py`` launches."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Dim
from fusedops_triton._constraints import supported

#: The longest row: of one group, a program holds the whole row.
_LONGEST = 8192
_CONSTRAINTS = (*supported("x", "gate"), Dim("x", (-1,), at_most=_LONGEST))
_SOURCE = "fusedops_triton/norms/_gated_norm.py"


@kernel(
    ops.gated_rms_norm,
    *_CONSTRAINTS,
    source=_SOURCE,
    rows_independent=True,
)
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    gate_first: bool,
    activation: str,
    groups: int,
    offset: float,
    save: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute the op for any rank, strides and dtypes."""
    from fusedops_triton.norms._gated_norm import (  # imports triton, so not at module level
        GatedNorm,
        gated_norm_forward,
    )

    options = GatedNorm(gate_first, activation == "silu", groups, offset)
    return gated_norm_forward(x, gate, weight, eps, options, save)


@kernel(
    ops.gated_rms_norm,
    *_CONSTRAINTS,
    direction="backward",
    source=_SOURCE,
    rows_independent=True,
)
def gated_rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    gate_first: bool,
    activation: str,
    groups: int,
    offset: float,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, gate and weight in one pass, and the sums of the weight's in a second one."""
    from fusedops_triton.norms._gated_norm import GatedNorm, gated_norm_backward

    options = GatedNorm(gate_first, activation == "silu", groups, offset)
    return gated_norm_backward(grad, x, gate, rstd, weight, options, needs)

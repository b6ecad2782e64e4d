"""gated_rms_norm in plain torch, without constraints. The computation is in ``_gated_norms.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_eager._gated_norms import gated_norm_backward, gated_norm_forward
from fusedops_eager._row_order import VECTORS


@kernel(
    ops.gated_rms_norm,
    source="fusedops_eager/_gated_norms.py",
    rows_independent=VECTORS,
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
    """Compute the op on any device, for any rank and dtypes."""
    y, rstd = gated_norm_forward(x, gate, weight, eps, gate_first, activation, groups, offset)
    return y, rstd if save else None


@kernel(
    ops.gated_rms_norm,
    direction="backward",
    source="fusedops_eager/_gated_norms.py",
    rows_independent=VECTORS,
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
    """Compute the gradients of x, gate and weight."""
    return gated_norm_backward(grad, x, gate, rstd, weight, gate_first, activation, groups, offset, needs)

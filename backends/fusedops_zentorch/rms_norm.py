"""rms_norm by zentorch: its constraints; what is corrected is in ``_norm.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.norms.formulas import rstd_of
from fusedops_zentorch._library import NOT_PROMISED
from fusedops_zentorch._norm import LIMITS, NO_BACKWARD, normalized


@kernel(
    ops.rms_norm,
    *LIMITS,
    source="zentorch::zentorch_rms_norm",
    deviations=(NO_BACKWARD,),
    rows_independent=NOT_PROMISED,
)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the op for any rank, and where a gradient is wanted rstd by a pass of its own."""
    return normalized(x, weight, eps, offset), rstd_of(x, eps, centered=False) if save else None

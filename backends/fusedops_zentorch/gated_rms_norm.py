"""gated_rms_norm by zentorch, where the gate multiplies the norm."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import SameDType, Scalar
from fusedops.ops.norms.arguments import GatedRmsNormArgs
from fusedops.ops.norms.formulas import gated_norm
from fusedops_zentorch._library import NOT_PROMISED, function
from fusedops_zentorch._norm import LIMITS, NO_BACKWARD, factor_of, rows_of


@kernel(
    ops.gated_rms_norm,
    *LIMITS,
    SameDType("gate", "x"),
    Scalar("gate_first", one_of=(False,)),
    Scalar("groups", one_of=(1,)),
    source="zentorch::gdn_rms_norm_gated",
    deviations=(NO_BACKWARD,),
    rows_independent=NOT_PROMISED,
)
def gated_rms_norm(a: GatedRmsNormArgs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the op for one group and a gate after the norm."""
    rstd = gated_norm(a.x, a.gate, None, a.eps, False, a.activation, 1, 0.0)[1] if save else None
    if not a.x.numel():
        return a.x.new_empty(a.x.shape), rstd
    given = rows_of(a.x), factor_of(a.x, a.weight, a.offset), rows_of(a.gate)
    return function("gdn_rms_norm_gated")(*given, a.eps, a.activation).view(a.x.shape), rstd

"""add_rms_norm by torch's sum and zentorch's norm.

zentorch's own ``zentorch_add_rms_norm_`` overwrites both of its arguments, each of which would have to be copied first,
and takes its mean square from the sum before that is rounded: in bfloat16 one result in 60 differs from the op's.
"""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import SameDType
from fusedops.ops.norms.arguments import AddRmsNormArgs
from fusedops.ops.norms.formulas import rstd_of
from fusedops_zentorch._library import NOT_PROMISED
from fusedops_zentorch._norm import LIMITS, NO_BACKWARD, normalized


@kernel(
    ops.add_rms_norm,
    *LIMITS,
    SameDType("residual", "x"),
    source="zentorch::zentorch_rms_norm",
    deviations=(NO_BACKWARD,),
    rows_independent=NOT_PROMISED,
)
def add_rms_norm(a: AddRmsNormArgs, save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the op for x and residual of one dtype."""
    s = (a.x + a.residual).contiguous()
    return normalized(s, a.weight, a.eps, a.offset), s, rstd_of(s, a.eps, centered=False) if save else None

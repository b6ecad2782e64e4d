"""gated_rms_norm in plain torch, without constraints. The computation is in ``_gated_norms.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.norms.arguments import GatedRmsNormArgs, GatedRmsNormGradArgs
from fusedops_eager._row_order import VECTORS
from fusedops_eager.norms._gated_norms import gated_norm_backward, gated_norm_forward


@kernel(
    ops.gated_rms_norm,
    source="fusedops_eager/norms/_gated_norms.py",
    rows_independent=VECTORS,
)
def gated_rms_norm(a: GatedRmsNormArgs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the op on any device, for any rank and dtypes."""
    y, rstd = gated_norm_forward(*a)
    return y, rstd if save else None


@kernel(
    ops.gated_rms_norm,
    direction="backward",
    source="fusedops_eager/norms/_gated_norms.py",
    rows_independent=VECTORS,
)
def gated_rms_norm_backward(a: GatedRmsNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, gate and weight."""
    return gated_norm_backward(*a)

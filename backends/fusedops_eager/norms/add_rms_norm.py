"""add_rms_norm in plain torch, without constraints. The computation is in ``_norms.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.norms.arguments import AddRmsNormArgs, AddRmsNormGradArgs
from fusedops_eager._row_order import SUMS
from fusedops_eager.norms._norms import rms_backward, rms_forward


@kernel(
    ops.add_rms_norm,
    source="torch.rms_norm, fusedops_eager/norms/_norms.py",
    rows_independent=SUMS,
)
def add_rms_norm(a: AddRmsNormArgs, save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the op on any device, for any rank and dtypes."""
    y, s, rstd = rms_forward(*a)
    return y, s, rstd if save else None


@kernel(
    ops.add_rms_norm,
    direction="backward",
    source="fusedops_eager/norms/_norms.py",
    rows_independent=SUMS,
)
def add_rms_norm_backward(a: AddRmsNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, residual and weight."""
    dtypes = (a.grad_y.dtype if a.needs[0] else None, a.residual_dtype if a.needs[1] else None)
    return rms_backward(a.grad_y, a.grad_s, a.s, a.rstd, a.weight, a.offset, dtypes, a.needs[2])

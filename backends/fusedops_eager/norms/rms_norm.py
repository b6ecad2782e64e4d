"""rms_norm in plain torch, without constraints. The computation is in ``_norms.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_eager._row_order import SUMS
from fusedops_eager.norms._norms import rms_backward, rms_forward


@kernel(
    ops.rms_norm,
    source="torch.rms_norm, fusedops_eager/norms/_norms.py",
    rows_independent=SUMS,
)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the op on any device, for any rank and dtypes."""
    y, _, rstd = rms_forward(x, None, weight, eps, offset)
    return y, rstd if save else None


@kernel(
    ops.rms_norm,
    direction="backward",
    source="fusedops_eager/norms/_norms.py",
    rows_independent=SUMS,
)
def rms_norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, offset: float, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x and weight."""
    dtypes = (x.dtype if needs[0] else None,)
    return rms_backward(grad, None, x, rstd, weight, offset, dtypes, needs[1])

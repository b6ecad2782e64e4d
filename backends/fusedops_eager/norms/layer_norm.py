"""layer_norm in plain torch, without constraints. The computation is in ``_norms.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_eager._row_order import on_cpu
from fusedops_eager.norms._norms import layer_backward, layer_forward


@kernel(
    ops.layer_norm,
    source="torch.native_layer_norm",
    rows_independent=on_cpu(),
)
def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the op on any device, for any rank and dtypes."""
    y, _, mean, rstd = layer_forward(x, None, weight, bias, eps)
    return y, mean if save else None, rstd if save else None


@kernel(
    ops.layer_norm,
    direction="backward",
    source="torch.native_layer_norm_backward",
    rows_independent=on_cpu(),
)
def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weight and bias."""
    dtypes = (x.dtype if needs[0] else None,)
    return layer_backward(grad, None, x, mean, rstd, weight, bias, dtypes, (needs[1], needs[2]))

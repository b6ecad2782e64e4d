"""add_layer_norm in plain torch, without constraints. The computation is in ``_norms.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.norms.arguments import AddLayerNormArgs, AddLayerNormGradArgs
from fusedops_eager._row_order import on_cpu
from fusedops_eager.norms._norms import layer_backward, layer_forward


@kernel(
    ops.add_layer_norm,
    source="torch.native_layer_norm",
    rows_independent=on_cpu(),
)
def add_layer_norm(a: AddLayerNormArgs, save: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute the op on any device, for any rank and dtypes."""
    y, s, mean, rstd = layer_forward(*a)
    return y, s, mean if save else None, rstd if save else None


@kernel(
    ops.add_layer_norm,
    direction="backward",
    source="torch.native_layer_norm_backward",
    rows_independent=on_cpu(),
)
def add_layer_norm_backward(a: AddLayerNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, residual, weight and bias."""
    dtypes = (a.grad_y.dtype if a.needs[0] else None, a.residual_dtype if a.needs[1] else None)
    return layer_backward(a.grad_y, a.grad_s, a.s, a.mean, a.rstd, a.weight, a.bias, dtypes, (a.needs[2], a.needs[3]))
